"""Gemma 4's vision model: any aspect ratio; each square of patches is pooled to one row."""

from math import prod, sqrt

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.shapes import rectangles
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotation
from model_zoo.layers.rope_scaling import plain_frequencies
from model_zoo.layers.vision.clamped import MATRICES, ClampedBatch, ClampedLinear, SandwichLayer
from model_zoo.layers.vision.patches import patch_embedding, squares
from model_zoo.layers.vision.rotary import coordinates
from model_zoo.layers.vision.vision_layer import layers_bytes
from model_zoo.layers.vision.vision_sizes import CHANNELS, VisionSizes
from runtime.vision.encoder import ImageLimits, ImageOutline, Pause, no_pause

EPS, POOLED, BASE, ROWS = 1e-6, 3, 100.0, 280
POOLED_KEY, AREA_KEY = "vision.projector.scale_factor", "vision.image_max_pixels"
# A tensor with the activation bounds of all matrices: of each layer, then of the projection.
LISTED = "clamp_data"
PROJECTION = "mm.input_projection"


class Gemma4Tower:
    """See `VisionTower`. pixels [images, 3, height, width] in [0, 1]; both sides are multiples of
    the side of a pooled square.

    The grid counts these squares, each of which becomes a row of features.
    """

    def __init__(self, w: TensorScope, metadata: Metadata) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        sizes.quarters()
        self._device, self._dtype = w.device, w.dtype
        self.pooled = pooled_side(metadata)
        v = w.scope("v")
        self._embed = patch_embedding(v, sizes, "patch_embd")
        self._position_embd = position_tables(v, sizes.hidden)
        self._frequencies = plain_frequencies(sizes.head_dim // 2, BASE).to(w.device)
        *bounds, last = _listed(v, sizes.layers)
        self._layers = [
            SandwichLayer(v.scope("blk", index), sizes, inside)
            for index, inside in enumerate(bounds)
        ]
        self._standard = [
            v.vector(name, size=sizes.hidden, bare=True, optional=True)
            for name in ("std_bias", "std_scale")
        ]
        shape = (w.shape(PROJECTION) or (1,))[0], sizes.hidden
        self._projection = ClampedLinear(w, PROJECTION, shape=shape, listed=last.get(PROJECTION))
        positions = self._position_embd.shape[1] // self.pooled
        unit = sizes.patch * self.pooled
        self.limits = largest_images(metadata, unit, positions, shape[0], w.dtype)

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self.pooled**2
        edges = rows * (5 * sizes.patch_elements + 5 * sizes.hidden)
        results = merged * (8 * sizes.hidden + 3 * self.limits.width)
        return 4 * (edges + results) + layers_bytes(self._device, sizes, self._layers, rows)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, (rows, columns) = len(pixels), (side * self.pooled for side in grid)
        patches = squares((2 * pixels - 1).to(self._dtype), self._sizes.patch)
        x = self._embed(patches.flatten(0, 1))
        down, across = coordinates(rows, columns, device=x.device)
        places = self._position_embd[0][across] + self._position_embd[1][down]
        x.view(images, rows * columns, -1).add_(places.to(x.dtype))
        angles = self._angles(across, images), self._angles(down, images)
        batch = ClampedBatch(images, *angles, pause)
        for layer in self._layers:
            x = layer(x, batch)
        merged = self._merged(x.view(images, rows, columns, -1)).flatten(0, 1).to(self._dtype)
        normed = RMSNorm(None, self._sizes.eps)(merged)
        return self._projection(normed).view(images, grid[0] * grid[1], -1)

    def _angles(self, places: Tensor, images: int) -> Rotation:
        angles = (places[:, None] * self._frequencies).repeat(images, 1)
        return Rotation(angles.cos(), angles.sin(), Pairs.NEOX)

    def _merged(self, x: Tensor) -> Tensor:
        """x [images, rows, columns, hidden] -> float32 [images, squares, hidden]: means of squares,
        scaled by sqrt(hidden)."""
        size = self.pooled
        down, right = x.shape[1] // size, x.shape[2] // size
        parts = x.unflatten(2, (right, size)).unflatten(1, (down, size))
        mean = parts.float().mean((2, 4)).flatten(1, 2).mul_(sqrt(self._sizes.hidden))
        bias, scale = self._standard
        return mean if bias is None or scale is None else mean.sub_(bias).mul_(scale)


def pooled_side(metadata: Metadata) -> int:
    """The side, in patches, of the squares that become one row."""
    return metadata.get_size(POOLED_KEY, POOLED, at_most=16)


def largest_images(
    metadata: Metadata, unit: int, positions: int, width: int, dtype: torch.dtype
) -> ImageLimits:
    """The size limits of images that consist of squares of `unit` pixels, at most `positions` per
    side."""
    rows = max(1, metadata.get_size(AREA_KEY, ROWS * unit**2) // unit**2)
    if rows > positions:
        raise metadata.error(
            AREA_KEY, f"allows {rows:,} rows, which is more than there are positions"
        )
    down, across = grid = max(rectangles(rows), key=prod)
    largest = ImageOutline((CHANNELS, down * unit, across * unit), grid, rows)
    return ImageLimits(rows, largest, width, dtype, whole=rows)


def position_tables(v: TensorScope, hidden: int) -> Tensor:
    """float32 [2, positions, hidden]: embeddings of columns and of rows."""
    name = "position_embd.weight"
    stored = v.shape(name, whole=True) or (2, 1, hidden)
    return v.table(name, shape=(2, stored[-2] if len(stored) == 3 else 1, hidden))


def _listed(v: TensorScope, layers: int) -> list[dict[str, Tensor]]:
    """The bounds of each matrix, if one tensor holds them all: those of each layer and those of the
    projection."""
    each = 4 * len(MATRICES)
    listed = v.table(LISTED, shape=(layers * each + 4,), optional=True)
    if listed is None:
        return [{} for _ in range(layers + 1)]
    *inside, last = listed.split([each] * layers + [4])
    named = [dict(zip(MATRICES, part.split(4), strict=True)) for part in inside]
    return [*named, {PROJECTION: last}]
