"""The step that is being planned, for deciding which proposed tokens pay in it."""

from dataclasses import dataclass

from runtime.engine.step_costs import StepCosts


@dataclass(slots=True)
class PlannedStep:
    """Its rows, the tokens that it is expected to yield, and the rows that are left for proposals.

    `overlaps`: steps are launched before the previous one is read back; a sequence whose proposal
    depends on all of its tokens then takes part in every other step only.
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
        """Tokens per unit of time, if a sequence proposes so many and yields `expected` tokens."""
        if proposed:
            expected *= self.share
        return (self.tokens - 1 + expected) / self.costs.of(self.rows + proposed)

    def take(self, proposed: int, expected: float) -> None:
        """A sequence proposes so many tokens, and yields `expected` ones."""
        self.rows, self.room = self.rows + proposed, self.room - proposed
        self.tokens += expected - 1
