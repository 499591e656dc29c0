"""Cutting images into an overview and slices of any aspect and about the same area, as LLaVA-UHD
and MiniCPM-V do."""

import math
from dataclasses import dataclass

from model_zoo.images.resize import MAX_ASPECT
from model_zoo.images.tiling import Grid, Size

NO_SLICES: Grid = (0, 0)


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
        counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= self.most]
        grids = [(n // wide, wide) for n in counts for wide in range(1, n + 1) if n % wide == 0]
        aspect = math.log(width / height)
        return min(grids, key=lambda grid: abs(aspect - math.log(grid[1] / grid[0])))

    def _fitted(self, height: float, width: float, *, enlarge: bool) -> Size:
        """The size with the area of the square, or less if the image may not be enlarged."""
        if enlarge or height * width > self.side**2:
            aspect = width / height
            height = int(self.side / math.sqrt(aspect))
            width = int(height * aspect)
        return self._whole(height), self._whole(width)

    def _whole(self, length: float) -> int:
        return _multiple(length, self.unit)


def _multiple(length: float, unit: int) -> int:
    """The nearest multiple of `unit`, at least one."""
    return max(round(length / unit), 1) * unit
