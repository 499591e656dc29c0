"""Vision model of HunyuanOCR and Hunyuan-VL: any aspect ratio, with rows for the ends of lines."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.vision.image_attention import slabs
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import patch_embedding, row_convolution
from model_zoo.layers.vision.position_table import position_table
from model_zoo.layers.vision.rectangle_tower import RectangleParts, RectangleTower
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import Pause

EPS = 1e-5
# Rows and columns that Tencent's code adds to the numbers from which it computes scales, lest they
# be rounded down to one less. The results depend on it.
ROUNDING = 0.1


def hunyuan_tower(w: TensorScope, metadata: Metadata, images: ImageBounds) -> RectangleTower:
    v = w.scope("v")
    sizes, side = VisionSizes.read(metadata, eps=EPS), merged_side(metadata)
    layers = [
        plain_layer(v.scope("blk", i), sizes, LayerNames(), gelu_erf) for i in range(sizes.layers)
    ]
    merger = _merger(w.scope("mm"), sizes, side)
    parts = RectangleParts(
        sizes,
        side,
        patch_embedding(v, sizes, "patch_embd"),
        layers,
        merger,
        partial(_stretched, position_table(v, sizes)),
        finish=LineEnds(w, sizes, merger.width),
    )
    return RectangleTower(w, parts, images)


def _stretched(table: Tensor, rows: int, columns: int) -> Tensor:
    """The table interpolated to `rows` and `columns`."""
    side = table.shape[-1]
    scales = (rows + ROUNDING) / side, (columns + ROUNDING) / side
    return F.interpolate(table, scale_factor=scales, mode="bilinear", align_corners=False)


def _merger(w: TensorScope, sizes: VisionSizes, side: int) -> RowProjector:
    """For squares of patches, by convolutions."""
    between, wide = ((w.shape(name) or (1,))[0] for name in ("0", "2"))
    return RowProjector(
        row_convolution(w, "0", hidden=sizes.hidden, out=between, side=side),
        row_convolution(w, "2", hidden=between, out=wide, side=1),
        (sizes.hidden * side**2, between, wide),
        w.rms_norm("pre_norm", sizes.eps, size=sizes.hidden),
    )


class LineEnds:
    """See `LineFinish`. Appends a row to each line, projects all rows, and norms them between those
    for the begin and the end of the image. wide: width of the rows."""

    def __init__(self, w: TensorScope, sizes: VisionSizes, wide: int) -> None:
        mm = w.scope("mm")
        self._line_end = w.vector("v.image_newline", size=wide, bare=True)
        self.width = (mm.shape("model.fc") or (1,))[0]
        self._project = mm.linear("model.fc", shape=(self.width, wide))
        self._begin, self._end = (
            mm.vector(f"image_{name}", size=self.width, bare=True) for name in ("begin", "end")
        )
        w.ignore("v.view_seperator")
        self._post_norm = mm.rms_norm("post_norm", sizes.eps, size=self.width)
        self.result_elements = 3 * wide + 5 * self.width

    def __call__(self, x: Tensor, pause: Pause) -> Tensor:
        """[images, lines, columns, wide] -> [images, 1 + lines * (columns + 1) + 1, width]."""
        images, lines, columns, _ = x.shape
        ends = self._line_end.to(x.dtype).expand(images, lines, 1, -1)
        ended = torch.cat([x, ends], dim=2)
        rows = self._projected(ended.flatten(0, 2), pause).view(images, lines * (columns + 1), -1)
        begin, end = (row.to(rows.dtype).expand(images, 1, -1) for row in (self._begin, self._end))
        return self._post_norm(torch.cat([begin, rows, end], dim=1))

    def _projected(self, x: Tensor, pause: Pause) -> Tensor:
        """x [rows, wide] -> [rows, width]."""
        projected = torch.empty(len(x), self.width, dtype=x.dtype, device=x.device)
        for rows in slabs(x, pause):
            projected[rows] = self._project(x[rows])
        return projected
