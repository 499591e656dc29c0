"""The vision model of Gemma 4 12B: one projection of each square of pixels, without layers."""

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.vision.image_attention import slab_rows, slabs
from model_zoo.layers.vision.patches import squares
from model_zoo.layers.vision.rotary import coordinates
from model_zoo.layers.vision.vision_layer import kernel_bytes
from model_zoo.layers.vision.vision_sizes import CHANNELS, MAX_PATCH
from model_zoo.models.gemma4.vision import (
    EPS,
    PROJECTION,
    largest_images,
    pooled_side,
    position_tables,
)
from runtime.vision.encoder import Pause, no_pause

# Epsilon of the layer norms, which no file states: torch's default, as in the authors' code.
NORM_EPS = 1e-5


class Gemma4UnifiedTower:
    """See `VisionTower`. pixels [images, 3, height, width] in [0, 1].

    Both sides are multiples of a square's side. The grid counts squares, each of which becomes a
    row of features.
    """

    def __init__(self, w: TensorScope, metadata: Metadata) -> None:
        self._device, self._dtype = w.device, w.dtype
        self.pooled = pooled_side(metadata)
        self._side = metadata.require_size("vision.patch_size", at_most=MAX_PATCH) * self.pooled
        self._elements = CHANNELS * self._side**2
        self._hidden = hidden = metadata.require_size("vision.embedding_length", at_most=1 << 20)
        self._eps = metadata.get_positive("vision.attention.layer_norm_epsilon", EPS)
        v = w.scope("v")
        self._pixel_norm = v.layer_norm("patch_norm.1", NORM_EPS, size=self._elements)
        self._embed = v.linear("patch_embd", shape=(hidden, self._elements))
        self._norm = v.layer_norm("patch_norm.2", NORM_EPS, size=hidden)
        self._position_embd = position_tables(v, hidden)
        self._place_norm = v.layer_norm("patch_norm.3", NORM_EPS, size=hidden)
        self._width = (w.shape(PROJECTION) or (1,))[0]
        self._projection = w.linear(PROJECTION, shape=(self._width, hidden))
        positions = self._position_embd.shape[1]
        self.limits = largest_images(metadata, self._side, positions, self._width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        rows, hidden = images * self.limits.rows, self._hidden
        slab = min(rows, slab_rows(self._device))
        kept = rows * (2 * self._elements + 3 * hidden + self._width)
        passing = slab * (3 * self._elements + 6 * hidden + 2 * self._width)
        matrix = hidden * max(self._elements, self._width)
        return 4 * (kept + passing) + kernel_bytes(self._device, largest_matrix=matrix, head_dim=1)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images = len(pixels)
        patches = squares(pixels.to(self._dtype), self._side).flatten(0, 1)
        down, across = coordinates(*grid, device=pixels.device)
        places = self._position_embd[0][across] + self._position_embd[1][down]
        added = places.to(self._dtype).repeat(images, 1)
        last = RMSNorm(None, self._eps)
        features = torch.empty(len(patches), self._width, dtype=self._dtype, device=patches.device)
        for rows in slabs(patches, pause):
            x = self._norm(self._embed(self._pixel_norm(patches[rows]))).add_(added[rows])
            features[rows] = self._projection(last(self._place_norm(x)))
        return features.view(images, grid[0] * grid[1], -1)
