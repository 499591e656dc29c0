"""Vision model of Qwen3-VL, with features for the first text layers as well, and of Qwen 3.5,
without them: any aspect ratio."""

from collections.abc import Sequence

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.vision.names import LayerNames, known_as
from model_zoo.layers.vision.patches import frame_embedding, stacked_frame_embedding
from model_zoo.layers.vision.position_table import interpolating, position_table
from model_zoo.layers.vision.rectangle_tower import RectangleParts, RectangleTower
from model_zoo.layers.vision.rotary import halves_rotary
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu

EPS, FRAMES, PLACES = 1e-6, 2, 2304
FILE_FRAMES = ("patch_embd.weight", "patch_embd.weight.1")
LAYER = LayerNames(
    attn_norm=("ln1", "norm1"),
    ffn_norm=("ln2", "norm2"),
    up=("ffn_up", "mlp.linear_fc1"),
    down=("ffn_down", "mlp.linear_fc2"),
)


def qwen3vl_tower(w: TensorScope, metadata: Metadata, images: ImageBounds) -> RectangleTower:
    """A row of features concatenates those of the last layer and those of the `deep` layers, one
    for each of the first text layers."""
    v = w.scope("v")
    sizes, side = VisionSizes.read(metadata, eps=EPS), merged_side(metadata)
    if v.has("patch_embed"):
        embed = stacked_frame_embedding(v, sizes, "patch_embed", frames=FRAMES)
    else:
        embed = frame_embedding(v, sizes, *FILE_FRAMES)
    table = position_table(v, sizes, known_as(v, "position_embd", "pos_embed"))
    parts = RectangleParts(
        sizes,
        side,
        embed,
        [plain_layer(v.scope("blk", i), sizes, LAYER, gelu) for i in range(sizes.layers)],
        _last_merger(w, sizes, side**2),
        interpolating(table, aligned=True),
        halves_rotary(w, sizes),
        _deep_mergers(v, sizes, side**2),
    )
    return RectangleTower(w, parts, images)


def _merger(w: TensorScope, sizes: VisionSizes, each: int, *names: str, late: bool) -> RowProjector:
    """For every `each` rows, which are normed before concatenation or, if `late`, after it."""
    norm, first, second = names
    wide, width = sizes.hidden * each, (w.shape(second) or (1,))[0]
    return RowProjector(
        w.linear(first, shape=(wide, wide)),
        w.linear(second, shape=(width, wide)),
        (wide, wide, width),
        w.layer_norm(norm, sizes.eps, size=wide if late else sizes.hidden),
        late=late,
    )


def _last_merger(w: TensorScope, sizes: VisionSizes, each: int) -> RowProjector:
    names = (
        known_as(w, "v.post_ln", "v.merger.norm"),
        known_as(w, "mm.0", "v.merger.linear_fc1"),
        known_as(w, "mm.2", "v.merger.linear_fc2"),
    )
    return _merger(w, sizes, each, *names, late=False)


def _deep_mergers(v: TensorScope, sizes: VisionSizes, each: int) -> dict[int, RowProjector]:
    """The mergers of intermediate layers in order, by the index of the layer whose output they
    take."""
    mergers = {}
    for number, layer in enumerate(_deep_layers(sizes.metadata, sizes.layers)):
        w = v.scope("deepstack", layer)
        if sizes.metadata.architecture != "clip":
            w = v.scope("deepstack_merger", number)
        first, second = known_as(w, "fc1", "linear_fc1"), known_as(w, "fc2", "linear_fc2")
        mergers[layer] = _merger(w, sizes, each, "norm", first, second, late=True)
    return mergers


def _deep_layers(metadata: Metadata, layers: int) -> Sequence[int]:
    """The layers with features for text layers; none if the file states none."""
    if metadata.architecture == "clip":
        flags = metadata.get_array("vision.is_deepstack_layers", bool) or ()
        listed = tuple(index for index, deep in enumerate(flags) if deep)
    else:
        listed = metadata.get_array("vision.deepstack_visual_indexes", int) or ()
    if list(listed) != sorted(set(listed)) or not all(0 <= layer < layers for layer in listed):
        raise metadata.error(
            "vision.deepstack_visual_indexes", f"names {listed} of {layers} layers, out of order"
        )
    return listed
