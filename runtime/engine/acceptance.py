"""How many proposed tokens of one sequence were accepted, and when proposing pauses."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

FIRST_TOKENS = 2  # length of the first proposal, and of the first one after a pause
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 1024  # tokens without proposals
LEAST_GAIN = 1.1  # factor in tokens per second that a proposal must be expected to yield
_KEPT = 0.9  # each proposal multiplies the weight of the earlier ones by this factor
_TRIED, _ACCEPTED = 2.0, 1.5  # initial values of a record
_CERTAIN = 0.98  # upper bound of the acceptance probability of a token


@dataclass(slots=True)
class Acceptance:
    """Statistics of the recent proposals of one source (n-grams or a draft model) for one sequence
    while it has its slot."""

    tried: float = _TRIED  # decayed number of proposed tokens compared with sampled ones
    accepted: float = _ACCEPTED  # decayed number of those that were equal
    most: int = FIRST_TOKENS  # maximum length of the next proposal
    pause: int = SHORTEST_PAUSE  # length of the next pause, in tokens
    paused_until: int = 0  # length of the sequence at which the current pause ends
    _proposed: tuple[int, ...] = ()  # the last proposal
    _length: int = 0  # length of the sequence at that time
    _withheld: bool = False  # whether no step computed it

    def propose(self, tokens: tuple[int, ...], length: int) -> None:
        """Record a proposal made when the sequence had `length` tokens."""
        self._proposed, self._length, self._withheld = tokens, length, False

    def withhold(self, tokens: tuple[int, ...], length: int) -> None:
        """Record tokens that could have been proposed, to learn whether they would have been
        accepted; ignored until those withheld before are reviewed."""
        if not self._proposed:
            self._proposed, self._length, self._withheld = tokens, length, True

    def review(self, tokens: Sequence[int], most: int) -> bool:
        """Compare the last proposal with the sampled tokens. Returns whether all of it was
        accepted; the next proposal may then be twice as long, up to `most` tokens."""
        proposed = self._proposed
        sampled = tokens[self._length : self._length + len(proposed)]
        pairs = zip(proposed, sampled, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._withheld and right == len(sampled) < len(proposed):
            return False  # the others are not sampled yet
        self._proposed = ()
        if not sampled:
            return False
        self.tried = _KEPT * self.tried + min(right + 1, len(proposed))
        self.accepted = _KEPT * self.accepted + right
        whole = right == len(proposed)
        if whole:
            self.most = min(2 * self.most, most)
            self.pause = max(self.pause // 2, SHORTEST_PAUSE)
        else:
            self.most = max(FIRST_TOKENS, min(self.most, 2 * right))
        return whole

    def miss(self) -> None:
        """The source proposed nothing after the sequence waited for it: counts as one rejection."""
        self.tried, self.accepted = _KEPT * self.tried + 1, _KEPT * self.accepted

    def rest(self, length: int) -> None:
        """Start a pause, each twice as long as the previous one, and reset the statistics, so that
        one wrong proposal is enough for the next pause."""
        self.paused_until = length + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.tried, self.accepted, self.most = _TRIED / 2, _ACCEPTED / 2, FIRST_TOKENS

    @property
    def chance(self) -> float:
        """Probability that the next proposed token is accepted."""
        return min(self.accepted / self.tried, _CERTAIN)

    def expected(self, count: int) -> float:
        """Expected number of tokens of a step with `count` proposed ones."""
        return (1 - self.chance ** (count + 1)) / (1 - self.chance)
