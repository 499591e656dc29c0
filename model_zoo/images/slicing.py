"""Cutting images into an overview and slices of any aspect and about the same area, as LLaVA-UHD
and MiniCPM-V do."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from model_zoo.images.equal_views import EqualViews
from model_zoo.images.resize import MAX_ASPECT
from model_zoo.images.tiling import Grid, Size

NO_SLICES: Grid = (0, 0)
# Of the aspects for which the units of parts are bounded.
STEP = 1.005


@dataclass(frozen=True, slots=True)
class Parts:
    """The overview's size in pixels, the grid of slices, and the size of each slice."""

    overview: Size
    grid: Grid = NO_SLICES
    slice_size: Size = (0, 0)

    @property
    def slices(self) -> int:
        return math.prod(self.grid)

    @property
    def refined(self) -> Size:
        """The size of the image that is cut into slices."""
        return self.grid[0] * self.slice_size[0], self.grid[1] * self.slice_size[1]

    def views(self, patch: int) -> tuple[EqualViews, ...]:
        """The overview and the slices, in patches with sides of `patch` pixels."""
        parts = ((1, 1), self.overview), (self.grid, self.slice_size)
        made = (EqualViews(grid, high // patch, wide // patch) for grid, (high, wide) in parts)
        return tuple(views for views in made if views.count)


@dataclass(frozen=True, slots=True)
class Slicing:
    """Xu et al., "LLaVA-UHD", section 3.1, as MiniCPM-V's authors implement it.

    side: a part has about the area of a square with this side. unit: sides of parts are multiples.
    most: the largest number of slices.
    """

    side: int
    unit: int
    most: int = 9

    @property
    def largest_area(self) -> int:
        """A bound of a part's area in pixels, for images of an accepted aspect.

        Both sides are rounded, and the area of the square bounds their product before. A slice may
        be longer than the image, since it is cut from whole pixels, but not twice as long.
        """
        across, times = self.side / self.unit, math.sqrt(2 * MAX_ASPECT)
        rounded = across**2 + across * (times + 1 / times) / 2 + 0.25
        line = across * times + 0.5  # of one unit's height
        return int(max(rounded, line)) * self.unit**2

    @property
    def most_units(self) -> int:
        """A bound of the units of all parts of an image of an accepted aspect."""
        return _most_units(self)

    @property
    def extremes(self) -> Iterator[Size]:
        """(height, width) of images of which one has about the most units."""
        for aspect in _aspects():
            height = math.ceil(self.side * math.sqrt(2 * self.most / aspect))
            width = min(math.ceil(height * aspect), MAX_ASPECT * height)
            yield min(height, MAX_ASPECT * width), width

    def grids(self, wanted: int) -> list[Grid]:
        """Grids of `wanted` slices, one fewer or one more."""
        counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= self.most]
        return [(n // wide, wide) for n in counts for wide in range(1, n + 1) if n % wide == 0]

    def parts(self, height: int, width: int) -> Parts:
        """How an image of that size is cut; small ones are enlarged and not cut."""
        grid = self._grid(height, width)
        overview = self._fitted(height, width, enlarge=grid == NO_SLICES)
        if grid == NO_SLICES:
            return Parts(overview)
        rows, columns = grid
        high, wide = _multiple(height, rows) / rows, _multiple(width, columns) / columns
        return Parts(overview, grid, self._fitted(high, wide, enlarge=True))

    def _grid(self, height: int, width: int) -> Grid:
        """Of the grids with nearly as many slices as fill the image, that with the nearest
        aspect."""
        wanted = min(math.ceil(height * width / self.side**2), self.most)
        if wanted <= 1:
            return NO_SLICES
        return _nearest(self.grids(wanted), width / height)

    def _fitted(self, height: float, width: float, *, enlarge: bool) -> Size:
        """The size with the area of the square, or less if the image may not be enlarged."""
        if enlarge or height * width > self.side**2:
            aspect = width / height
            height = int(self.side / math.sqrt(aspect))
            width = int(height * aspect)
        return self._whole(height), self._whole(width)

    def _whole(self, length: float) -> int:
        return _multiple(length, self.unit)


def _nearest(grids: Iterable[Grid], aspect: float) -> Grid:
    """The grid whose aspect differs from that of an image by the smallest factor."""
    logarithm = math.log(aspect)
    return min(grids, key=lambda grid: abs(logarithm - math.log(grid[1] / grid[0])))


@cache
def _most_units(slicing: Slicing) -> int:
    """See `Slicing.most_units`. Bounds the units of each small range of aspects.

    Sides of a part are at most those of the area of the square, before they are rounded to units.
    An image that fills more than `wanted - 1` squares has a least height and width, which bound by
    how much the aspect of a slice changes when its sides are rounded to pixels.
    """
    most = 0
    for aspect in _aspects():
        low, high = aspect / STEP, aspect * STEP
        overview = _units(slicing, low, high)
        most = max(most, overview)
        for wanted in range(2, slicing.most + 1):
            grids = slicing.grids(wanted)
            area = (wanted - 1) * slicing.side**2
            for rows, columns in {_nearest(grids, low), _nearest(grids, high)}:
                error = rows / math.sqrt(area / high) + columns / math.sqrt(area * low)
                factor = 1 + error / 2 + error**2
                sliced = _units(
                    slicing, low * rows / columns / factor, high * rows / columns * factor
                )
                most = max(most, overview + rows * columns * sliced)
    return most


def _aspects() -> Iterator[float]:
    """Width by height, each the last one times the square of a step."""
    count = math.ceil(math.log(MAX_ASPECT) / math.log(STEP) / 2)
    return (STEP ** (2 * index) for index in range(-count, count + 1))


def _units(slicing: Slicing, low: float, high: float) -> int:
    """A bound of the units of a part whose aspect is between these."""
    across = slicing.side / slicing.unit
    rows, columns = across / math.sqrt(low), across * math.sqrt(high)
    return max(math.floor(rows + 0.5), 1) * max(math.floor(columns + 0.5), 1)


def _multiple(length: float, unit: int) -> int:
    """The nearest multiple of `unit`, at least one."""
    return max(round(length / unit), 1) * unit
