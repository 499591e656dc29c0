"""Images that are prepared as views of several sizes, in patches of one size."""

import math
from dataclasses import dataclass

from model_zoo.images.tiling import Grid


@dataclass(frozen=True, slots=True)
class EqualViews:
    """A grid of views of an image, such as its tiles, each of `rows` x `columns` patches."""

    grid: Grid
    rows: int
    columns: int

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    @property
    def patches(self) -> int:
        """Of all of them."""
        return self.count * self.rows * self.columns
