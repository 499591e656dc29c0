"""Speculative decoding: which tokens to propose for the next step, and whether that pays.

A step computes rows for proposed tokens beside the row that samples anyway. Sampling depends on
seed and position only, so proposals change how many tokens a step yields, and never which.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import takewhile
from weakref import WeakKeyDictionary

from runtime.engine.ngram_index import NGramIndex
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import StepPlan

FIRST_TOKENS = 2  # of the first proposal, and of the first one after a pause
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 1024  # tokens without proposals
INDEXED_TOKENS = 1024  # that one step adds to the indices of all sequences
LEAST_GAIN = 1.1  # in tokens per second
_KEPT = 0.8  # of the weight of earlier proposals, at each one
_TRIED, _ACCEPTED = 2.0, 1.5  # what a record begins with
_CERTAIN = 0.98  # no token is accepted with more probability


class StepCosts:
    """The duration of decode steps as a linear function of their rows, fitted with forgetting."""

    KEPT = 0.98  # of the weight of earlier steps, at each one
    SLOPE_KEPT = 0.99  # at a step that says nothing about it, so that it is measured again
    LONGEST = 1.5  # times the expected duration; what takes longer has other reasons

    def __init__(self) -> None:
        self._weight = self._rows = self._squares = self._times = self._products = 0.0
        self._slope = 0.0
        self._seen: set[int] = set()  # numbers of rows

    def observe(self, rows: int, duration: float) -> None:
        """The first step of a number of rows is not counted: it may prepare the others."""
        if rows not in self._seen:
            self._seen.add(rows)
            return
        if self._weight:
            duration = min(duration, self.LONGEST * self.of(rows))
        self._weight = self.KEPT * self._weight + 1
        self._rows = self.KEPT * self._rows + rows
        self._squares = self.KEPT * self._squares + rows * rows
        self._times = self.KEPT * self._times + duration
        self._products = self.KEPT * self._products + rows * duration
        spread = self._spread
        if spread > 1:
            shared = self._products - self._rows * self._times / self._weight
            self._slope = max(0.0, shared / spread)
        else:
            self._slope *= self.SLOPE_KEPT

    def needs(self, rows: int) -> bool:
        """Whether a step of so many rows should be measured: all recent ones had as many others."""
        return self._spread <= 1 and self._rows > (rows + 0.5) * self._weight

    @property
    def _spread(self) -> float:
        return self._squares - self._rows**2 / self._weight if self._weight else 0.0

    def of(self, rows: int) -> float:
        """The expected duration of a step; 1 before the first one."""
        if not self._weight:
            return 1.0
        mean = self._rows / self._weight
        return max(self._times / self._weight + self._slope * (rows - mean), self._slope * rows)


@dataclass(slots=True)
class _Record:
    """What became of the proposals for a sequence while it has its slot."""

    epoch: int
    index: NGramIndex
    tried: float = _TRIED  # recent tokens that were compared with sampled ones
    accepted: float = _ACCEPTED  # those of them that were equal
    most: int = FIRST_TOKENS  # of the next proposal
    pause: int = SHORTEST_PAUSE  # the next one
    paused_until: int = 0  # length of the sequence
    proposed: tuple[int, ...] = ()  # the last proposal
    length: int = 0  # of the sequence at that time
    waited: bool = False  # whether the sequence has left out a step to propose

    def review(self, tokens: Several[int], most: int) -> None:
        """Compare the last proposal with what was sampled. A proposal that is accepted whole
        doubles the next one, to `most` tokens."""
        sampled = tokens[self.length : self.length + len(self.proposed)]
        if not sampled:
            return
        pairs = zip(self.proposed, sampled, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.tried = _KEPT * self.tried + min(right + 1, len(self.proposed))
        self.accepted = _KEPT * self.accepted + right
        if right == len(self.proposed):
            self.most = min(2 * self.most, most)
            self.pause = max(self.pause // 2, SHORTEST_PAUSE)
        else:
            self.most = max(FIRST_TOKENS, min(self.most, 2 * right))
        self.proposed = ()

    def note_wait(self) -> None:
        """There is nothing to propose; a wait for it counts as a token that was not accepted."""
        if self.waited:
            self.tried, self.accepted = _KEPT * self.tried + 1, _KEPT * self.accepted
            self.waited = False

    def rest(self, length: int) -> None:
        """Propose nothing for a while, longer each time, and begin anew after it."""
        self.paused_until = length + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.tried, self.accepted, self.most = _TRIED, _ACCEPTED, FIRST_TOKENS

    def expected(self, count: int) -> float:
        """The tokens that a step yields with so many proposed ones."""
        chance = min(self.accepted / self.tried, _CERTAIN)
        return (1 - chance ** (count + 1)) / (1 - chance)


@dataclass(slots=True)
class _Step:
    """The step that is being planned: its rows, the tokens that it is expected to yield, the rows
    that are left, and the places that may still be indexed before it."""

    rows: int
    tokens: float
    room: int
    indexing: int = INDEXED_TOKENS


class Speculation:
    """Proposes tokens for running sequences before each plan, where they have occurred before.

    `most`: tokens of a proposal. `draws`: rows of a step that may draw. `overlaps`: steps are
    launched before the previous one is read back; a sequence whose proposal depends on all of its
    tokens then takes part in every other step only.
    """

    def __init__(self, *, most: int, draws: int, overlaps: bool) -> None:
        assert 0 < most < draws
        self._most, self._draws, self._overlaps = most, draws, overlaps
        self._costs = StepCosts()
        self._records: WeakKeyDictionary[Sequence, _Record] = WeakKeyDictionary()

    def observe(self, plan: StepPlan, duration_ns: int) -> None:
        """A retired step and its time. Steps with prompts do not count."""
        rows = len(plan.chunks)
        if sum(chunk.length for chunk in plan.chunks) == rows:
            self._costs.observe(rows, duration_ns)

    def propose(self, running: Several[Sequence], *, joining: int) -> None:
        """Set what the sequences propose for the next plan, or that they wait for their last token
        to propose. `joining`: sequences that the plan may admit."""
        for sequence in running:
            sequence.proposed, sequence.waits_to_propose = (), False
        rows = len(running)
        step = _Step(rows, rows, self._draws - rows - joining)
        if not rows or self._costs.needs(rows) or not self._may_pay(step):
            return
        for sequence in running:
            if step.room > 0:
                self._propose_for(sequence, step)

    def _propose_for(self, sequence: Sequence, step: _Step) -> None:
        record, length = self._record(sequence), len(sequence.tokens)
        step.indexing -= record.index.extend(step.indexing)
        if not sequence.may_propose:
            return
        record.review(sequence.tokens, self._most)
        room = min(record.most, step.room, sequence.most_tokens - sequence.length - 1)
        if length < record.paused_until or room <= 0:
            return
        found = record.index.continuation(room)
        if found and sequence.matcher is not None and not sequence.pending:
            found = found[: sequence.matcher.acceptable(found)]
        if not found:
            record.note_wait()
            return
        rates = [self._rate(step, n, record.expected(n)) for n in range(len(found) + 1)]
        count = rates.index(max(rates))
        if rates[count] < LEAST_GAIN * rates[0]:
            record.rest(length)
        elif sequence.pending:
            sequence.waits_to_propose = record.waited = True
        else:
            sequence.proposed = record.proposed = found[:count]
            record.length, record.waited = length, False
            step.rows, step.room = step.rows + count, step.room - count
            step.tokens += record.expected(count) - 1

    def _may_pay(self, step: _Step) -> bool:
        """Whether proposals for one sequence pay if all tokens are accepted."""
        count = min(self._most, step.room)
        best = self._rate(step, count, count + 1)
        return count > 0 and best >= LEAST_GAIN * self._rate(step, 0, 1)

    def _rate(self, step: _Step, proposed: int, expected: float) -> float:
        """Tokens per unit of time, if a sequence proposes so many and yields `expected` tokens."""
        if proposed and self._overlaps and step.rows > 1:
            expected /= 2  # it takes part in every other step
        return (step.tokens - 1 + expected) / self._costs.of(step.rows + proposed)

    def _record(self, sequence: Sequence) -> _Record:
        found = self._records.get(sequence)
        if found is None or found.epoch != sequence.epoch:
            index = NGramIndex(sequence.tokens, most_tokens=sequence.most_tokens)
            found = self._records[sequence] = _Record(sequence.epoch, index)
        return found
