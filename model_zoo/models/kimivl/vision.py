"""Vision model of Kimi-VL and Kimi K2.5: MoonViT, whose patches are merged two by two."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import DEFAULT_BASE, plain_frequencies
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, whole
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import patch_embedding, squares
from model_zoo.layers.vision.position_table import add_positions_, position_table
from model_zoo.layers.vision.rotary import PlaneRotary, coordinates
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import layers_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.kimivl.image_processor import KimiVLProcessor
from runtime.kernels.pointwise import gelu
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS = 1e-5


class KimiVLTower:
    """See `VisionTower`. pixels [images, 3, height, width], both sides multiples of the side of a
    merged patch; the grid is that of merged patches. images: the processor of its images. apart:
    whether the pairs of a head that are turned by column precede those turned by row, as in files
    of Kimi K2.5, where they alternate in those of Kimi-VL."""

    def __init__(
        self, w: TensorScope, metadata: Metadata, images: KimiVLProcessor, *, apart: bool = False
    ) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._device, self._dtype, self.images = w.device, w.dtype, images
        v = w.scope("v")
        self._embed = patch_embedding(v, sizes, "patch_embd")
        self._position_embd = position_table(v, sizes)
        sizes.quarters()
        frequencies = plain_frequencies(sizes.head_dim // 2, DEFAULT_BASE).to(w.device)
        self._rotary = PlaneRotary(
            frequencies, frequencies, Pairs.INTERLEAVED, alternating=not apart
        )
        layer = partial(plain_layer, sizes=sizes, names=LayerNames(), curve=gelu)
        self._layers = [layer(v.scope("blk", index)) for index in range(sizes.layers)]
        self._post_norm = v.layer_norm("post_ln", sizes.eps, size=sizes.hidden)
        mm, wide = w.scope("mm"), sizes.hidden * images.merge**2
        width = (mm.shape("2") or (1,))[0]
        self._projector = RowProjector(
            mm.linear("1", shape=(wide, wide)),
            mm.linear("2", shape=(width, wide)),
            (wide, wide, width),
            mm.layer_norm("input_norm", EPS, size=sizes.hidden),
        )
        self.limits = ImageLimits(images.most_rows, images.largest, width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self.images.merge**2
        edges = rows * (3 * sizes.patch_elements + 7 * sizes.hidden + sizes.head_dim)
        return 4 * (edges + 2 * merged * self.limits.width) + layers_bytes(
            self._device, sizes, [*self._layers, self._projector], rows
        )

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, merge = len(pixels), self.images.merge
        rows, columns = (length * merge for length in grid)
        down, right = coordinates(rows, columns, block=merge, device=pixels.device)
        order = down * columns + right
        patches = squares(pixels.to(self._dtype), self._sizes.patch)[:, order]
        x = self._embed(patches.flatten(0, 1))
        add_positions_(x, self._stretched(rows, columns), down, right)
        rotation = repeated(self._rotary(right, down), images)
        batch = ImageBatch(images, whole(rows * columns), rotation, pause)
        for layer in self._layers:
            x = layer(x, batch)
        return self._projector(self._post_norm(x), pause).view(images, -1, self.limits.width)

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """The position table interpolated to `rows` and `columns`."""
        if self._position_embd.shape[2:] == (rows, columns):
            return self._position_embd
        return F.interpolate(self._position_embd, size=(rows, columns), mode="bicubic")
