"""What became of the tokens that one source proposed for a sequence, and when it is to rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

FIRST_TOKENS = 2  # of the first proposal, and of the first one after a pause
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 1024  # tokens without proposals
LEAST_GAIN = 1.1  # in tokens per second
_KEPT = 0.8  # of the weight of earlier proposals, at each one
_TRIED, _ACCEPTED = 2.0, 1.5  # what a record begins with
_CERTAIN = 0.98  # no token is accepted with more probability


@dataclass(slots=True)
class Acceptance:
    """The recent proposals of one source for one sequence, while the sequence has its slot."""

    tried: float = _TRIED  # recent tokens that were compared with sampled ones
    accepted: float = _ACCEPTED  # those of them that were equal
    most: int = FIRST_TOKENS  # of the next proposal
    pause: int = SHORTEST_PAUSE  # the next one
    paused_until: int = 0  # length of the sequence
    _proposed: tuple[int, ...] = ()  # the last proposal
    _length: int = 0  # of the sequence at that time

    def propose(self, tokens: tuple[int, ...], length: int) -> None:
        """`length`: of the sequence, which the tokens may follow."""
        self._proposed, self._length = tokens, length

    def review(self, tokens: Sequence[int], most: int) -> bool:
        """Compare the last proposal with what was sampled; whether it was accepted whole, which
        doubles the next one, to `most` tokens."""
        proposed, self._proposed = self._proposed, ()
        sampled = tokens[self._length : self._length + len(proposed)]
        if not sampled:
            return False
        pairs = zip(proposed, sampled, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
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
        """Nothing could be proposed after all: counts as a token that was not accepted."""
        self.tried, self.accepted = _KEPT * self.tried + 1, _KEPT * self.accepted

    def rest(self, length: int) -> None:
        """Propose nothing for a while, longer each time, and begin anew after it."""
        self.paused_until = length + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.tried, self.accepted, self.most = _TRIED, _ACCEPTED, FIRST_TOKENS

    @property
    def chance(self) -> float:
        """That the next token is accepted."""
        return min(self.accepted / self.tried, _CERTAIN)

    def expected(self, count: int) -> float:
        """The tokens that a step yields with so many proposed ones."""
        return (1 - self.chance ** (count + 1)) / (1 - self.chance)
