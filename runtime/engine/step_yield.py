"""The expected yield of the step that is being planned, and what proposed tokens add to it."""

from collections.abc import Sequence as Several
from dataclasses import dataclass

from runtime.engine.acceptance import LEAST_GAIN, Acceptance
from runtime.engine.sequence import Sequence
from runtime.engine.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class ProposalCandidate:
    """A sequence that may propose up to `most` tokens."""

    sequence: Sequence
    acceptance: Acceptance
    most: int


@dataclass(slots=True)
class StepYield:
    """`rows`: planned rows; `tokens`: expected number of tokens; `room`: rows left for proposals.

    `overlaps`: steps are launched before the previous one is read back. A sequence with proposals,
    which must wait for its last token, then takes part in every other step only.
    """

    costs: StepCosts
    rows: int
    tokens: float
    room: int
    overlaps: bool = False

    @property
    def share(self) -> float:
        """The part of the steps in which a sequence with proposals takes part."""
        return 0.5 if self.overlaps and self.rows > 1 else 1.0

    @property
    def rate(self) -> float:
        """Expected tokens per unit of time."""
        return self.tokens / self.costs.of(self.rows)

    def could_gain(self, most: int) -> bool:
        """Whether it would pay off that one sequence proposes `most` tokens if all are accepted."""
        tokens = self.tokens - 1 + (most + 1) * self.share
        return tokens / self.costs.of(self.rows + most) >= LEAST_GAIN * self.rate

    def divided(self, candidates: Several[ProposalCandidate]) -> list[int]:
        """How many tokens each sequence proposes so that the step yields the most tokens per unit
        of time; none where that is not LEAST_GAIN as much as without proposals.

        Dinkelbach's method: each row costs as many tokens as the best rate so far yields in its
        time, and each sequence proposes as many as are worth their cost.
        """
        counts, rate = [0] * len(candidates), self.rate
        while True:
            better = self._worth(candidates, rate * self.costs.slope)
            gained = sum(
                self._gain(candidate, n) for candidate, n in zip(candidates, better, strict=True)
            )
            found = (self.tokens + gained) / self.costs.of(self.rows + sum(better))
            if found <= rate:
                break
            counts, rate = better, found
        return counts if rate >= LEAST_GAIN * self.rate else [0] * len(candidates)

    def take(self, candidate: ProposalCandidate, count: int) -> None:
        """Add the `count` tokens that a sequence proposes."""
        self.rows, self.room = self.rows + count, self.room - count
        self.tokens += self._gain(candidate, count)

    def _worth(self, candidates: Several[ProposalCandidate], price: float) -> list[int]:
        """How many tokens each sequence proposes if a row costs `price` tokens. Where rows do not
        suffice, those go first that are accepted with the highest probability."""
        counts = []
        for candidate in candidates:
            worth = [
                self._gain(candidate, count) - price * count for count in range(candidate.most + 1)
            ]
            counts.append(worth.index(max(worth)))
        if sum(counts) <= self.room:
            return counts
        chances = (
            (candidate.acceptance.chance**n, which)
            for which, (candidate, count) in enumerate(zip(candidates, counts, strict=True))
            for n in range(1, count + 1)
        )
        counts = [0] * len(candidates)
        for _, which in sorted(chances, reverse=True)[: self.room]:
            counts[which] += 1
        pairs = zip(candidates, counts, strict=True)
        return [count if self._gain(candidate, count) > 0 else 0 for candidate, count in pairs]

    def _gain(self, candidate: ProposalCandidate, count: int) -> float:
        """How many more tokens a sequence is expected to yield if it proposes `count`."""
        return candidate.acceptance.expected(count) * self.share - 1 if count else 0.0
