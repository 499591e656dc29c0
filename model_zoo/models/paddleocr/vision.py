"""Vision model of PaddleOCR-VL: SigLIP for any aspect ratio, whose patches are rotated by row and
column, and merged two by two."""

import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds, blank
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, whole
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import patch_embedding
from model_zoo.layers.vision.rotary import coordinates, halves_rotary
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.square_places import add_places_, square_places
from model_zoo.layers.vision.vision_layer import layers_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu
from runtime.vision.encoder import ImageLimits, Pause, PreparedImage, no_pause

EPS = 1e-6
# Of the first norm of the projector, which no setting changes.
PROJECTOR_EPS = 1e-5


class PaddleTower:
    """See `VisionTower`. pixels [images, patches, channels * side * side].

    Patches that are merged are consecutive; these squares are in row-major order of the rectangle
    `grid`.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        before = w.loaded_bytes
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._device, self._dtype = w.device, w.dtype
        self._merge = merged_side(metadata)
        v = w.scope("v")
        self._embed = patch_embedding(v, sizes, "patch_embd")
        self._places = square_places(v, sizes)
        self._rotary = halves_rotary(w, sizes)
        self._layers = [
            plain_layer(v.scope("blk", i), sizes, LayerNames(), gelu) for i in range(sizes.layers)
        ]
        self._post_norm = v.layer_norm("post_ln", sizes.eps, size=sizes.hidden)
        self._projector = _projector(w, sizes, self._merge**2)
        self._largest = images.largest
        self.limits = ImageLimits(images.most_rows, self._projector.width, w.dtype)
        self.weight_bytes = w.loaded_bytes - before

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self._merge**2
        edges = rows * (2 * sizes.patch_elements + 6 * sizes.hidden)
        return 4 * (edges + 2 * merged * self.limits.width) + layers_bytes(
            self._device, sizes, [*self._layers, self._projector], rows
        )

    def largest(self) -> PreparedImage:
        return blank(self._largest)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, (rows, columns) = len(pixels), (side * self._merge for side in grid)
        x = self._embed(pixels.to(self._dtype).flatten(0, 1))
        down, across = coordinates(rows, columns, block=self._merge, device=x.device)
        add_places_(x, self._stretched(rows, columns), down, across)
        rotation = repeated(self._rotary(down, across), images)
        batch = ImageBatch(images, whole(rows * columns), rotation, pause)
        for layer in self._layers:
            x = layer(x, batch)
        projected = self._projector(self._post_norm(x), pause)
        return projected.view(images, grid[0] * grid[1], -1)

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """The position table interpolated to `rows` and `columns`."""
        return F.interpolate(
            self._places, size=(rows, columns), mode="bilinear", align_corners=False
        )


def _projector(w: TensorScope, sizes: VisionSizes, each: int) -> RowProjector:
    """For every `each` rows, which are normed again."""
    mm, wide = w.scope("mm"), sizes.hidden * each
    width = (mm.shape("2") or (1,))[0]
    return RowProjector(
        mm.linear("1", shape=(wide, wide)),
        mm.linear("2", shape=(width, wide)),
        (wide, wide, width),
        mm.layer_norm("input_norm", PROJECTOR_EPS, size=sizes.hidden),
    )
