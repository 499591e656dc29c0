"""Vision model of LFM2-VL: SigLIP 2 on tiles and on the whole image in any aspect ratio."""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.vision.image_attention import AttentionSpan, ImageBatch
from model_zoo.layers.vision.names import LayerNames, known_as
from model_zoo.layers.vision.patches import patch_embedding
from model_zoo.layers.vision.position_table import gathered_positions, position_table
from model_zoo.layers.vision.rotary import coordinates
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import layers_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.lfm2.image_processor import ImageParts, Lfm2Processor
from runtime.kernels.pointwise import gelu
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS, PROJECTOR_EPS, MERGED = 1e-6, 1e-5, 2


class Lfm2Tower:
    """See `VisionTower`. pixels and grid: those of `Lfm2Processor`, as are the rows of features.

    The rows of a tile attend to each other only, and those of the whole image likewise.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, processor: Lfm2Processor) -> None:
        self._processor = processor
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._device, self._dtype = w.device, w.dtype
        v = w.scope("v")
        self._embed = patch_embedding(v, sizes, "patch_embd")
        self._position_embd = position_table(v, sizes)
        self._layers = [
            plain_layer(v.scope("blk", i), sizes, LayerNames(), gelu) for i in range(sizes.layers)
        ]
        self._norm = v.layer_norm("post_ln", sizes.eps, size=sizes.hidden)
        self._projector = _projector(w.scope("mm"), sizes.hidden, processor.merge**2)
        self.limits = ImageLimits(
            processor.most_rows, processor.largest, self._projector.width, w.dtype
        )

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self._processor.merge**2
        edges = rows * (2 * sizes.patch_elements + 5 * sizes.hidden)
        # The positions of one image, one axis interpolated and both.
        edges += 4 * self.limits.rows * self._processor.merge**2 * sizes.hidden
        return 4 * (edges + 2 * merged * self.limits.width) + layers_bytes(
            self._device, sizes, [*self._layers, self._projector], rows
        )

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, rows = len(pixels), pixels.shape[1] // self._processor.merge**2
        parts = self._processor.parts_of(grid, rows)
        x = self._embed(pixels.to(self._dtype).flatten(0, 1))
        x.view(*pixels.shape[:2], -1).add_(self._positions(parts))
        batch = ImageBatch(images, self._spans(parts), pause=pause)
        for layer in self._layers:
            x = layer(x, batch)
        return self._projector(self._norm(x), pause).view(images, -1, self.limits.width)

    def _positions(self, parts: ImageParts) -> Tensor:
        """[patches of an image, hidden] in the order of its pixels."""
        planes = [self._stretched(*size).repeat(count, 1) for count, size in parts.planes]
        return torch.cat(planes).to(self._dtype)

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """The position table interpolated to a part of so many rows and columns of features.

        Averages are taken where it shrinks, as in the reference.
        """
        merge = self._processor.merge
        high, wide = rows * merge, columns * merge
        plane = F.interpolate(
            self._position_embd, (high, wide), mode="bilinear", align_corners=False, antialias=True
        )
        down, across = coordinates(high, wide, block=merge, device=plane.device)
        return gathered_positions(plane, down, across)

    def _spans(self, parts: ImageParts) -> list[AttentionSpan]:
        spans, begin = [], 0
        for count, size in parts.planes:
            end = begin + count * prod(size) * self._processor.merge**2
            spans.append(AttentionSpan(begin, end, begin, end, count))
            begin = end
        return spans


def _projector(w: TensorScope, hidden: int, each: int) -> RowProjector:
    """For every `each` rows, with a norm if the file has one."""
    name, wide = known_as(w, "input_norm", "layer_norm"), hidden * each
    between, width = (w.shape("1") or (1,))[0], (w.shape("2") or (1,))[0]
    return RowProjector(
        w.linear("1", shape=(between, wide)),
        w.linear("2", shape=(width, between)),
        (wide, between, width),
        w.layer_norm(name, PROJECTOR_EPS, size=wide) if w.has(name) else None,
        late=True,
    )
