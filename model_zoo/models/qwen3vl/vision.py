"""Vision model of Qwen3-VL, with features for the first text layers as well, and of Qwen 3.5,
without them: any aspect ratio."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds, blank
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, whole
from model_zoo.layers.vision.names import LayerNames, known_as
from model_zoo.layers.vision.patches import frame_embedding, stacked_frame_embedding
from model_zoo.layers.vision.rotary import coordinates, halves_rotary
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.square_places import add_places_, square_places
from model_zoo.layers.vision.vision_layer import LayerNeeds, layers_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu
from runtime.vision.encoder import ImageLimits, Pause, PreparedImage, no_pause

EPS, FRAMES, PLACES = 1e-6, 2, 2304
FILE_FRAMES = ("patch_embd.weight", "patch_embd.weight.1")
LAYER = LayerNames(
    attn_norm=("ln1", "norm1"),
    ffn_norm=("ln2", "norm2"),
    up=("ffn_up", "mlp.linear_fc1"),
    down=("ffn_down", "mlp.linear_fc2"),
)


class DeepTower:
    """See `VisionTower`. pixels [images, patches, channels * side * side].

    Patches that are merged are consecutive; these squares are in row-major order of the rectangle
    `grid`. A row of features concatenates those of the last layer and those of the `deep` layers,
    one for each of the first text layers.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        before = w.loaded_bytes
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._device, self._dtype = w.device, w.dtype
        self._merge = merged_side(metadata)
        v = w.scope("v")
        if v.has("patch_embed"):
            self._embed = stacked_frame_embedding(v, sizes, "patch_embed", frames=FRAMES)
        else:
            self._embed = frame_embedding(v, sizes, *FILE_FRAMES)
        self._places = square_places(v, sizes, known_as(v, "position_embd", "pos_embed"))
        self._rotary = halves_rotary(w, sizes)
        self._layers = [
            plain_layer(v.scope("blk", i), sizes, LAYER, gelu) for i in range(sizes.layers)
        ]
        each = self._merge**2
        self._merger = _last_merger(w, sizes, each)
        self._deep = _deep_mergers(v, sizes, each)
        self._largest = images.largest
        self.depth = 1 + len(self._deep)
        self.limits = ImageLimits(images.most_rows, self._merger.width * self.depth, w.dtype)
        self.weight_bytes = w.loaded_bytes - before

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self._merge**2
        edges = rows * (2 * sizes.patch_elements + 5 * sizes.hidden)
        needs: list[LayerNeeds] = [*self._layers, self._merger, *self._deep.values()]
        return 4 * (edges + 2 * merged * self.limits.width) + layers_bytes(
            self._device, sizes, needs, rows
        )

    def largest(self) -> PreparedImage:
        return blank(self._largest)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, (rows, columns) = len(pixels), (side * self._merge for side in grid)
        x = self._embed(pixels.to(self._dtype).flatten(0, 1))
        down, across = coordinates(rows, columns, block=self._merge, device=x.device)
        add_places_(x, self._stretched(rows, columns), down, across)
        batch = ImageBatch(
            images, whole(rows * columns), repeated(self._rotary(down, across), images), pause
        )
        deep = []
        for index, layer in enumerate(self._layers):
            x = layer(x, batch)
            if index in self._deep:
                deep.append(self._deep[index](x, pause))
        return torch.cat([self._merger(x, pause), *deep], dim=1).view(images, grid[0] * grid[1], -1)

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """The position table interpolated to `rows` and `columns`, with aligned corners."""
        return F.interpolate(
            self._places, size=(rows, columns), mode="bilinear", align_corners=True
        )


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
