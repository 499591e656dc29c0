"""Sizes of images that keep their aspect ratio within bounds of their area."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from model_zoo.images.resize import MAX_ASPECT
from model_zoo.images.shapes import rectangles


class Growth(Enum):
    """How an image with a side of less than one unit becomes one with sides of one at the least.

    BOTH: both sides are scaled by one factor and rounded down. IN_TURN: the other side is rounded
    after the height grew, and again after the width grew.
    """

    BOTH = auto()
    IN_TURN = auto()

    def grown(self, height: int, width: int, unit: int) -> tuple[int, int]:
        """Height and width in pixels, of which one is less than `unit`, after growth."""
        if self is Growth.BOTH:
            scale = max(unit / height, unit / width)
            return max(int(height * scale), unit), max(int(width * scale), unit)
        if height < unit:
            height, width = unit, round(width * unit / height)
        if width < unit:
            height, width = round(height * unit / width), unit
        return height, width


@dataclass(frozen=True, slots=True)
class BoundedArea:
    """Sizes in squares of `unit` pixels, for images at most `MAX_ASPECT` times as long as wide.

    min_pixels, max_pixels: bounds of the area. Before the area is compared with them, `grows`
    enlarges an image with a side of less than one unit until that side is one, and a side that
    rounds to nothing has `shortest` units.
    """

    unit: int
    min_pixels: int
    max_pixels: int
    shortest: int = 0
    grows: Growth | None = None

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """The nearest sides in units; both are scaled if their area is out of bounds."""
        unit = self.unit
        if self.grows and min(height, width) < unit:
            height, width = self.grows.grown(height, width, unit)
        rows, columns = (max(round(side / unit), self.shortest) for side in (height, width))
        area = rows * unit * columns * unit
        if area > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(math.floor(height / shrink / unit), 1)
            columns = max(math.floor(width / shrink / unit), 1)
        elif area < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * enlarge / unit)
            columns = math.ceil(width * enlarge / unit)
        return rows, columns

    @property
    def most(self) -> int:
        """A bound of the units of every image. Computed with integers, so that rounding cannot make
        it too small."""
        # A side shrinks to one unit at the least, so a strip may exceed `max_pixels`.
        strip = math.isqrt(MAX_ASPECT * self.max_pixels) // self.unit
        enlarged = max(units for units, _ in self._enlarged())
        return max(self.max_pixels // self.unit**2, strip, enlarged)

    @property
    def largest(self) -> tuple[int, int]:
        """(height, width) of the image with the most units."""
        return max(self.extremes(), key=lambda size: math.prod(self.grid(*size)))

    def extremes(self) -> Iterator[tuple[int, int]]:
        """(height, width) of images of which one has the most units: rectangles that fill the area,
        the longest strip, and enlarged images."""
        unit = self.unit
        for high, wide in rectangles(max(self.max_pixels // unit**2, 1)):
            if wide <= MAX_ASPECT * high:
                yield high * unit, wide * unit
        yield unit, MAX_ASPECT * unit
        yield from (size for _, size in self._enlarged())

    def _enlarged(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """For images that are enlarged to `min_pixels`: for each possible number of units along the
        shorter side, a bound of the units, and (height, width) of an image near that bound.

        Both sides are rounded up. A side of n units was longer than n - 1 units, so the other was
        shorter than the area divided by n - 1 units. The maximum aspect ratio bounds the shorter
        side.
        """
        area, unit = self.min_pixels, self.unit
        fewest = math.isqrt(area // (MAX_ASPECT * unit**2)) + 1
        yield fewest * (math.isqrt(MAX_ASPECT * area) // unit + 1), (1, MAX_ASPECT)
        for units in range(fewest + 1, math.isqrt(area // unit**2) + 2):
            exceeded = (units - 1) * unit
            half = exceeded // 2 + 1
            size = half, max((area * half - 1) // exceeded**2, 1)
            yield units * (area // (exceeded * unit) + 1), size
