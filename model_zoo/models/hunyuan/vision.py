"""Vision model of HunyuanOCR and Hunyuan-VL: any aspect ratio, with rows for the ends of lines."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds, blank
from model_zoo.layers.vision.image_attention import ImageBatch, slabs, whole
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import patch_embedding, row_convolution
from model_zoo.layers.vision.rotary import coordinates
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.square_places import add_places_, square_places
from model_zoo.layers.vision.vision_layer import layers_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import ImageLimits, Pause, PreparedImage, no_pause

EPS = 1e-5
# Rows and columns that Tencent's code adds to the numbers from which it computes scales, lest they
# be rounded down to one less. The results depend on it.
ROUNDING = 0.1


class LinedTower:
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
        self._layers = [
            plain_layer(v.scope("blk", i), sizes, LayerNames(), gelu_erf)
            for i in range(sizes.layers)
        ]
        self._merger = LineMerger(w, sizes, self._merge)
        self._largest = images.largest
        self.limits = ImageLimits(images.most_rows, self._merger.width, w.dtype)
        self.weight_bytes = w.loaded_bytes - before

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self._merge**2
        edges = rows * (2 * sizes.patch_elements + 5 * sizes.hidden)
        results = merged * self._merger.result_elements
        return 4 * (edges + results) + layers_bytes(
            self._device, sizes, [*self._layers, self._merger.squares], rows
        )

    def largest(self) -> PreparedImage:
        return blank(self._largest)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, (rows, columns) = len(pixels), (side * self._merge for side in grid)
        x = self._embed(pixels.to(self._dtype).flatten(0, 1))
        down, across = coordinates(rows, columns, block=self._merge, device=x.device)
        add_places_(x, self._stretched(rows, columns), down, across)
        batch = ImageBatch(images, whole(rows * columns), pause=pause)
        for layer in self._layers:
            x = layer(x, batch)
        return self._merger(x, images, grid, pause)

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """The position table interpolated to `rows` and `columns`."""
        side = self._places.shape[-1]
        scales = (rows + ROUNDING) / side, (columns + ROUNDING) / side
        return F.interpolate(
            self._places, scale_factor=scales, mode="bilinear", align_corners=False
        )


class LineMerger:
    """Merges squares of patches, appends a row to each line, projects all rows, and norms them
    between those for the begin and the end of the image. squares: see `LayerNeeds`.
    result_elements: of results per row."""

    def __init__(self, w: TensorScope, sizes: VisionSizes, side: int) -> None:
        mm = w.scope("mm")
        norm = mm.rms_norm("pre_norm", sizes.eps, size=sizes.hidden)
        between, wide = ((mm.shape(name) or (1,))[0] for name in ("0", "2"))
        first = row_convolution(mm, "0", hidden=sizes.hidden, out=between, side=side)
        second = row_convolution(mm, "2", hidden=between, out=wide, side=1)
        self.squares = RowProjector(first, second, (sizes.hidden * side**2, between, wide), norm)
        self._line_end = w.vector("v.image_newline", size=wide, bare=True)
        self.width = (mm.shape("model.fc") or (1,))[0]
        self._project = mm.linear("model.fc", shape=(self.width, wide))
        self._begin, self._end = (
            mm.vector(f"image_{name}", size=self.width, bare=True) for name in ("begin", "end")
        )
        w.ignore("v.view_seperator")
        self._post_norm = mm.rms_norm("post_norm", sizes.eps, size=self.width)
        self.result_elements = 3 * wide + 5 * self.width

    def __call__(self, x: Tensor, images: int, grid: tuple[int, int], pause: Pause) -> Tensor:
        """x [images * patches, hidden], lines and columns of squares -> [images, 1 + lines *
        (columns + 1) + 1, width]."""
        lines, columns = grid
        merged = self.squares(x, pause)
        ends = self._line_end.to(merged.dtype).expand(images, lines, 1, -1)
        ended = torch.cat([merged.view(images, lines, columns, -1), ends], dim=2)
        rows = self._projected(ended.flatten(0, 2), pause).view(images, lines * (columns + 1), -1)
        begin, end = (row.to(rows.dtype).expand(images, 1, -1) for row in (self._begin, self._end))
        return self._post_norm(torch.cat([begin, rows, end], dim=1))

    def _projected(self, x: Tensor, pause: Pause) -> Tensor:
        """x [rows, wide] -> [rows, width]."""
        projected = torch.empty(len(x), self.width, dtype=x.dtype, device=x.device)
        for rows in slabs(x, pause):
            projected[rows] = self._project(x[rows])
        return projected
