"""The step being planned: the expected gain from adding proposed tokens to it."""

from dataclasses import dataclass

from runtime.engine.step_costs import StepCosts


@dataclass(slots=True)
class PlannedStep:
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

    def rate(self, proposed: int, expected: float) -> float:
        """Tokens per unit of time if a sequence proposes `proposed` tokens and yields `expected`
        ones."""
        if proposed:
            expected *= self.share
        return (self.tokens - 1 + expected) / self.costs.of(self.rows + proposed)

    def take(self, proposed: int, expected: float) -> None:
        """Add a sequence's `proposed` tokens to the step; it is expected to yield `expected`."""
        self.rows, self.room = self.rows + proposed, self.room - proposed
        self.tokens += expected - 1
