"""How long decode steps take, as a function of their rows."""


class StepCosts:
    """The duration of decode steps as a linear function of their rows, fitted with forgetting."""

    KEPT = 0.98  # each step multiplies the weight of earlier ones by this factor
    # Decay of the slope at steps whose numbers of rows vary too little to measure it; once it is
    # low, other numbers of rows are tried.
    SLOPE_KEPT = 0.99
    LONGEST = 1.5  # longer durations, relative to the expected one, are cut to this: outliers

    def __init__(self) -> None:
        self._weight = self._rows = self._squares = self._times = self._products = 0.0
        self.slope = 0.0  # what a further row adds
        self._seen: set[int] = set()  # numbers of rows that have occurred

    def observe(self, rows: int, duration: float) -> None:
        """Record a step. The first one of each number of rows is ignored: it may be recorded or
        captured, which takes longer."""
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
            self.slope = max(0.0, shared / spread)
        else:
            self.slope *= self.SLOPE_KEPT

    def needs(self, rows: int) -> bool:
        """Whether a step with `rows` rows should be measured, because all recent steps had the same
        larger number of rows."""
        return self._spread <= 1 and self._rows > (rows + 0.5) * self._weight

    @property
    def measured(self) -> bool:
        return self._weight > 0

    @property
    def _spread(self) -> float:
        return self._squares - self._rows**2 / self._weight if self._weight else 0.0

    def of(self, rows: int) -> float:
        """The expected duration of a step; 1 before the first one."""
        if not self._weight:
            return 1.0
        mean = self._rows / self._weight
        return max(self._times / self._weight + self.slope * (rows - mean), self.slope * rows)
