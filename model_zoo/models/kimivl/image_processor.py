"""Image processor of Kimi-VL and Kimi K2.5: keeps size and aspect of images up to a number of
patches."""

import math
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from model_zoo.images.normalise import STANDARD, Normalisation
from model_zoo.images.resize import (
    MAX_ASPECT,
    Filter,
    Pixels,
    check_aspect,
    resized,
    unsuitable,
)
from model_zoo.images.tiling import Size, on_canvas
from runtime.vision.encoder import ImageOutline

MOST_PATCHES = 4096
# The code of Kimi-VL refuses images with 512 patches or more along a side.
EDGE_PATCHES = 511
# That of Kimi K2.5 scales images down that have more.
MOST_ALONG_A_SIDE = 512


@dataclass(frozen=True, slots=True)
class KimiVLProcessor:
    """pixels [3, height, width], black at the right and bottom so that both sides are multiples of
    `patch * merge`; grid: height and width of the rectangle of feature rows.

    patches: number of whole patches above which images are scaled down. side: number of patches
    along a side above which they are scaled down, too; None: images with more than `EDGE_PATCHES`
    are refused.
    """

    patch: int
    merge: int
    patches: int = MOST_PATCHES
    side: int | None = None
    normalisation: Normalisation = STANDARD

    @property
    def most_rows(self) -> int:
        """Scaling leaves somewhat more patches than `patches`, since it counts whole ones only.

        An image with (a, b) whole patches has less area than one of (a + 1, b + 1), so that after
        scaling (ab)² <= patches * (a + 1) * (b + 1). One without a whole patch is not scaled. With
        a `side`, any may become one: (a, b) whole patches are then fewer than (b + 1) *
        √(patches / ab) along the longer side, where b is less than the greatest aspect times a + 1.
        """
        most = 0
        for high in range(math.isqrt(self.patches) + 2):
            wide, below = self._edge * self.merge, (high + 1) * self.patch  # pixels
            if high:
                share = self.patches * (high + 1) / high**2
                wide = min(wide, int((share + math.sqrt(share**2 + 4 * share)) / 2))
            elif self.side:
                wide = min(wide, math.isqrt(2 * (MAX_ASPECT + 1) * self.patches) + 1)
            longest = -(-MAX_ASPECT * below // (self.patch * self.merge))
            columns = min(wide // self.merge + 1, longest, self._edge)
            most = max(most, (high // self.merge + 1) * columns)
        return most

    @property
    def largest(self) -> ImageOutline:
        """The best of lines, one of them without a whole patch, and of images that have a few whole
        patches too many and a part of one more."""
        line = max(self.patch - 1, 1)  # without a whole patch
        sizes = [(line, min(self._edge * self.patch * self.merge, MAX_ASPECT * line))]
        for high in range(1, math.isqrt(self.patches) + 2):
            shorter = (high + 1) * self.patch - 1
            sizes.append((shorter, MAX_ASPECT * shorter))
            least = self.patches // high + 1
            for wide in range(least, 2 * least, max(least // 32, 1)):
                sizes.append((shorter, (wide + 1) * self.patch - 1))
        made = (self._grid(*size) for size in sizes if size[1] <= MAX_ASPECT * size[0])
        return self._outline(max(filter(None, made), key=math.prod))

    def outline(self, height: int, width: int) -> ImageOutline:
        """Raises RequestError for an image with too many patches along a side."""
        check_aspect(height, width)
        grid = self._grid(height, width)
        if grid is None:
            edge = self._edge * self.merge
            times = edge // (self.patches // edge + 1)
            raise unsuitable(height, width, f"at most {max(times, 1)} times as long as wide")
        return self._outline(grid)

    def pixels(self, image: Pixels) -> Tensor:
        _, height, width = self.outline(*image.shape[:2]).shape
        scaled = resized(image, *self._scaled(*image.shape[:2]), Filter.BICUBIC)
        return self.normalisation(on_canvas(scaled, height, width))

    def within(self, rows: int) -> Self:
        """See `ScalableProcessor`. Both sides are rounded up to whole merged patches."""
        side = self.merge * max(math.isqrt(rows) - 1, 1)
        return replace(self, patches=min(self.patches, side**2))

    @property
    def _edge(self) -> int:
        """The largest number of merged patches along a side."""
        return (self.side or EDGE_PATCHES) // self.merge

    def _outline(self, grid: Size) -> ImageOutline:
        unit = self.patch * self.merge
        return ImageOutline((3, grid[0] * unit, grid[1] * unit), grid, math.prod(grid))

    def _grid(self, height: int, width: int) -> Size | None:
        unit = self.patch * self.merge
        high, wide = (-(-length // unit) for length in self._scaled(height, width))
        return (high, wide) if max(high, wide) <= self._edge else None

    def _scaled(self, height: int, width: int) -> Size:
        if self.side is not None:
            return self._scaled_to_side(height, width)
        count = (height // self.patch) * (width // self.patch)
        if count <= self.patches:
            return height, width
        scale = math.sqrt(self.patches / count)
        return max(int(height * scale), 1), max(int(width * scale), 1)

    def _scaled_to_side(self, height: int, width: int) -> Size:
        """A side of less than a patch counts as one."""
        assert self.side is not None
        whole = max(1, height // self.patch) * max(1, width // self.patch)
        longest = self.side * self.patch
        scale = min(1.0, math.sqrt(self.patches / whole), longest / height, longest / width)
        high, wide = (min(max(1, int(side * scale)), longest) for side in (height, width))
        return high, wide
