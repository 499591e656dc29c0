"""LLaVA 1.6's and Granite Vision's model: the whole image and tiles of it, without padding."""

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.tiling import Size, best_canvas, canvas_grid, unpadded
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor
from model_zoo.models.llava.vision import ASPECT_KEY, ProjectedVit
from runtime.errors import UnsupportedModelError
from runtime.vision.encoder import ImageLimits, Pause, no_pause

CANVASES_KEY, MERGE_KEY = "vision.image_grid_pinpoints", "vision.mm_patch_merge_type"
TILED, MERGED = "anyres", "spatial_unpad"
MOST_CANVASES, MOST_TILES = 128, 64


class LlavaNextTower:
    """See `VisionTower`. pixels [images, 1 + tiles, 3, side, side], the whole image first; grid:
    height and width of the original image.

    Features: those of the whole image, then those of the canvas without padding, line by line, each
    line followed by one learned row. images: the processor of its images.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: LlavaNextProcessor) -> None:
        self._projected = projected = ProjectedVit(w, metadata)
        self.images = images
        self._line_end = w.table("model.image_newline", shape=(projected.width,)).to(w.dtype)
        self.limits = ImageLimits(images.most_rows, images.largest, projected.width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        squares = images * self.images.most_squares
        ordered = squares * self._projected.across**2 + 2 * images * self.limits.rows
        return 4 * ordered * self.limits.width + self._projected.nbytes(squares)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, across, width = len(pixels), self._projected.across, self.limits.width
        squares = self._projected(pixels.flatten(0, 1), pause).view(images, -1, across**2, width)
        down, right = canvas_grid(best_canvas(*grid, self.images.canvases), self.images.side)
        tiles = squares[:, 1:].view(images, down, right, across, across, width)
        canvas = tiles.transpose(2, 3).reshape(images, down * across, right * across, width)
        lines = self._image_on(canvas, grid)
        ends = self._line_end.expand(images, lines.shape[1], 1, width)
        return torch.cat([squares[:, 0], torch.cat([lines, ends], 2).flatten(1, 2)], 1)

    def _image_on(self, canvas: Tensor, size: Size) -> Tensor:
        """canvas [images, lines, columns, width] -> the centred part that the image covers."""
        full = canvas.shape[1], canvas.shape[2]
        lines, columns = unpadded(*size, full)
        top, left = (full[0] - lines) // 2, (full[1] - columns) // 2
        return canvas[:, top : top + lines, left : left + columns]


def has_tiles(metadata: Metadata) -> bool:
    """Whether a file is for this vision model rather than LLaVA 1.5's."""
    return metadata.has(CANVASES_KEY)


def read_canvases(metadata: Metadata, side: int) -> tuple[Size, ...]:
    """(height, width) of each canvas, multiples of `side`, in the order of the checkpoint's
    settings. UnsupportedModelError for another way of merging tiles.
    """
    for key, known in ((ASPECT_KEY, TILED), (MERGE_KEY, MERGED)):
        stated = metadata.get(key, str, known)
        if stated != known:
            raise UnsupportedModelError(
                f"{metadata.path}: `{metadata.full_key(key)}` is {stated[:80]}; of projectors with "
                f"tiles, those with {known} are served."
            )
    sides = metadata.require_array(CANVASES_KEY, int)
    if not 2 <= len(sides) <= 2 * MOST_CANVASES or len(sides) % 2:
        raise metadata.error(CANVASES_KEY, f"has {len(sides):,} numbers, not pairs of sides")
    canvases = tuple(zip(sides[::2], sides[1::2], strict=True))
    for high, wide in canvases:
        in_tiles = min(high, wide) >= side and not high % side and not wide % side
        if not in_tiles or high * wide > MOST_TILES * side**2:
            raise metadata.error(
                CANVASES_KEY,
                f"names {high:,} x {wide:,}; canvases are of up to {MOST_TILES} whole tiles of "
                f"{side}",
            )
    return canvases
