"""Vision model of PaddleOCR-VL: SigLIP for any aspect ratio, whose patches are rotated by row and
column, and merged two by two."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import patch_embedding
from model_zoo.layers.vision.position_table import interpolating, position_table
from model_zoo.layers.vision.rectangle_tower import RectangleParts, RectangleTower
from model_zoo.layers.vision.rotary import halves_rotary
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu

EPS = 1e-6
# Of the first norm of the projector, which no setting changes.
PROJECTOR_EPS = 1e-5


def paddleocr_tower(w: TensorScope, metadata: Metadata, images: ImageBounds) -> RectangleTower:
    v = w.scope("v")
    sizes, side = VisionSizes.read(metadata, eps=EPS), merged_side(metadata)
    parts = RectangleParts(
        sizes,
        side,
        patch_embedding(v, sizes, "patch_embd"),
        [plain_layer(v.scope("blk", i), sizes, LayerNames(), gelu) for i in range(sizes.layers)],
        _projector(w, sizes, side**2),
        interpolating(position_table(v, sizes)),
        halves_rotary(w, sizes),
    )
    return RectangleTower(w, parts, images)


def _projector(w: TensorScope, sizes: VisionSizes, each: int) -> RowProjector:
    """For every `each` rows, which are normed twice."""
    last = w.layer_norm("v.post_ln", sizes.eps, size=sizes.hidden)
    mm, wide = w.scope("mm"), sizes.hidden * each
    width = (mm.shape("2") or (1,))[0]
    norm = mm.layer_norm("input_norm", PROJECTOR_EPS, size=sizes.hidden)
    return RowProjector(
        mm.linear("1", shape=(wide, wide)),
        mm.linear("2", shape=(width, wide)),
        (wide, wide, width),
        lambda x: norm(last(x)),
    )
