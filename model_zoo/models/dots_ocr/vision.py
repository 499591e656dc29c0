"""Vision model of dots.ocr: that of Qwen2.5-VL without windows and biases, with norms of patches,
of the last layer and, with a bias, of what is merged."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import patch_embedding
from model_zoo.layers.vision.rectangle_tower import RectangleParts, RectangleTower
from model_zoo.layers.vision.rotary import halves_rotary
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import VisionLayer, read_gated, read_layer, rms_norms
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import silu_mul

EPS = 1e-5
# Of the norm of what is merged, which no setting changes.
MERGER_EPS = 1e-6
MERGED_KEY = "vision.projector.scale_factor"


def dots_tower(w: TensorScope, metadata: Metadata, images: ImageBounds) -> RectangleTower:
    v = w.scope("v")
    sizes, side = VisionSizes.read(metadata, eps=EPS), merged_side(metadata, MERGED_KEY)
    embed = patch_embedding(v, sizes, "patch_embd")
    norm = v.rms_norm("pre_ln", sizes.eps, size=sizes.hidden)
    parts = RectangleParts(
        sizes,
        side,
        lambda pixels: norm(embed(pixels)),
        [_layer(v.scope("blk", i), sizes) for i in range(sizes.layers)],
        _projector(w.scope("mm"), sizes, side**2),
        rotary=halves_rotary(w, sizes),
    )
    return RectangleTower(w, parts, images)


def _layer(w: TensorScope, sizes: VisionSizes) -> VisionLayer:
    gated = read_gated(w, sizes, silu_mul)
    return read_layer(w, sizes, LayerNames(), rms_norms(w, sizes), gated)


def _projector(mm: TensorScope, sizes: VisionSizes, each: int) -> RowProjector:
    """For every `each` rows, which are normed twice."""
    last = mm.rms_norm("post_norm", sizes.eps, size=sizes.hidden)
    norm = mm.layer_norm("input_norm", MERGER_EPS, size=sizes.hidden)
    wide, width = sizes.hidden * each, (mm.shape("2") or (1,))[0]
    return RowProjector(
        mm.linear("0", shape=(wide, wide)),
        mm.linear("2", shape=(width, wide)),
        (wide, wide, width),
        lambda x: norm(last(x)),
    )
