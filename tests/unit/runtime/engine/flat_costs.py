"""Steps that take the same time for any number of rows, so that it is certain which drafts pay."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """In place of `StepCosts`."""

    duration: float
    measured: bool = True
    slope: float = 0.0

    def observe(self, rows: int, duration: float) -> None: ...

    def needs(self, rows: int) -> bool:
        return False

    def of(self, rows: int) -> float:
        return self.duration
