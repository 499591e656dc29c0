"""Vision model of Muse Glimmer: most layers attend within windows; channels of merged patches
alternate."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import DEFAULT_BASE, plain_frequencies
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, slabs, whole
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import patch_embedding, squares
from model_zoo.layers.vision.position_table import position_table
from model_zoo.layers.vision.rotary import PlaneRotary, coordinates
from model_zoo.layers.vision.vision_layer import layers_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from model_zoo.layers.vision.windows import windows
from model_zoo.models.muse_glimmer.image_processor import MuseProcessor
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS = 1e-5
FULL_EVERY = 4  # and the last layer; as in llama.cpp


class MuseTower:
    """See `VisionTower`. pixels [images, 3, height, width], both sides multiples of the side of a
    merged patch; the grid is that of merged patches. images: the processor of its images."""

    def __init__(self, w: TensorScope, metadata: Metadata, images: MuseProcessor) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._device, self._dtype, self._merge = w.device, w.dtype, merged_side(metadata)
        v = w.scope("v")
        self._embed = patch_embedding(v, sizes, "patch_embd")
        self._position_embd = position_table(v, sizes)
        self._window = self._position_embd.shape[2]
        sizes.quarters()
        frequencies = plain_frequencies(sizes.head_dim // 2, DEFAULT_BASE).to(w.device)
        self._rotary = PlaneRotary(frequencies, frequencies, Pairs.INTERLEAVED)
        norm = partial(v.layer_norm, eps=sizes.eps, size=sizes.hidden)
        self._pre_norm, self._post_norm = norm("pre_ln"), norm("post_ln")
        layer = partial(plain_layer, sizes=sizes, names=LayerNames(), curve=gelu_erf)
        self._layers = [layer(v.scope("blk", index)) for index in range(sizes.layers)]
        self._projector = _Projector(w.scope("mm"), sizes.hidden * self._merge**2)
        self.limits = ImageLimits(images.most_rows, images.largest, self._projector.width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self._merge**2
        edges = rows * (3 * sizes.patch_elements + 6 * sizes.hidden + sizes.head_dim)
        return 4 * (edges + 3 * merged * self.limits.width) + layers_bytes(
            self._device, sizes, [*self._layers, self._projector], rows
        )

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, (rows, columns) = len(pixels), (side * self._merge for side in grid)
        x = self._embed(squares(pixels.to(self._dtype), self._sizes.patch).flatten(0, 1))
        x.view(images, -1, self._sizes.hidden).add_(self._positions(rows, columns).to(x.dtype))
        arrangement = windows(rows, columns, self._window, device=x.device)
        x = arrangement.arranged(self._pre_norm(x).view(images, rows * columns, -1)).flatten(0, 1)
        down, across = arrangement.order // columns, arrangement.order % columns
        rotation = repeated(self._rotary(across + 1, down + 1), images)  # counted from 1
        near = ImageBatch(images, arrangement.spans, rotation, pause)
        far = ImageBatch(images, whole(rows * columns), rotation, pause)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            x = layer(x, far if (index + 1) % FULL_EVERY == 0 or index == last else near)
        x = arrangement.restored(self._post_norm(x).view(images, rows * columns, -1))
        down, across = coordinates(rows, columns, block=self._merge, device=x.device)
        merged = x[:, down * columns + across].unflatten(1, (-1, self._merge**2))
        return self._projector(merged.flatten(0, 1).transpose(1, 2).flatten(1), pause).view(
            images, -1, self.limits.width
        )

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[rows * columns, hidden]: the position table, which is 0 outside, at the centres of the
        cells of this grid."""
        high, wide = (
            (torch.arange(count, device=self._device) * 2 + 1) / count - 1
            for count in (rows, columns)
        )
        places = torch.stack(torch.meshgrid(wide, high, indexing="xy"), dim=-1)
        plane = F.grid_sample(self._position_embd, places[None], align_corners=False)
        return plane[0].flatten(1).t()


class _Projector:
    """Three layers with an erf GELU between them, in slabs; x [n, wide] -> [n, width]. See
    `LayerNeeds`."""

    kept_elements = 0

    def __init__(self, mm: TensorScope, wide: int) -> None:
        between, self.width = ((mm.shape(name) or (1,))[0] for name in ("0", "2"))
        self._layers = (
            mm.linear("0", shape=(between, wide)),
            mm.linear("1", shape=(between, between)),
            mm.linear("2", shape=(self.width, between)),
        )
        self.row_elements = wide + 4 * between + 2 * self.width
        self.matrix_elements = between * max(wide, between, self.width)

    def __call__(self, x: Tensor, pause: Pause) -> Tensor:
        projected = torch.empty(len(x), self.width, dtype=x.dtype, device=x.device)
        first, second, third = self._layers
        for rows in slabs(x, pause):
            projected[rows] = third(gelu_erf(second(gelu_erf(first(x[rows])))))
        return projected
