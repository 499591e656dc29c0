"""DeepSeek-OCR's vision model: SAM's encoder on views of an image, CLIP on its rows, and both in
one projection."""

from dataclasses import replace
from functools import partial
from math import isqrt

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.equal_views import EqualViews
from model_zoo.layers.vision.image_attention import ImageBatch, slabs, whole
from model_zoo.layers.vision.names import LayerNames, first_table, known_as
from model_zoo.layers.vision.of_views import of_all_views
from model_zoo.layers.vision.vision_layer import layers_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.deepseekocr.sam import SamEncoder, sam_scope, sam_sizes, stretched
from runtime.kernels.pointwise import gelu_quick
from runtime.vision.encoder import ImageLimits, Pause, no_pause

# Of CLIP's norms; llama.cpp's converter states another one, which llama.cpp does not use.
EPS = 1e-5
# The minimum and maximum of tiles per image, if the file states none.
TILES = 2, 9
OLLAMA_HEADS = {"heads": "vision.head_count"}
# Names in files of llama.cpp and of Ollama.
NAMES = LayerNames(
    attn_norm=("ln1", "layer_norm1"),
    whole=("attn_qkv", "self_attn.qkv_proj"),
    output=("attn_out", "self_attn.out_proj"),
    ffn_norm=("ln2", "layer_norm2"),
    up=("ffn_up", "mlp.fc1"),
    down=("ffn_down", "mlp.fc2"),
)
LINE_END = "v.image_newline", "mm.image_newline"
IMAGE_END = "v.view_seperator", "mm.view_seperator"  # as spelled in files


class DeepseekOCRTower:
    """See `VisionTower`. pixels and grid: those of `DeepseekOCRProcessor`, as are the rows of
    features. images: the processor of its images."""

    def __init__(self, w: TensorScope, metadata: Metadata, images: DeepseekOCRProcessor) -> None:
        self.images, self._device = images, w.device
        sides = images.side // images.patch, images.tile // images.patch
        sam = sam_scope(w)
        self._sam = SamEncoder(sam, sam_sizes(sam, metadata), sides)
        self._clip = RowClip(w.scope("v"), metadata, self._sam.width)
        mm = w.scope("mm")
        name = known_as(mm, "model.fc", "layers")
        width = (mm.shape(name) or (1,))[0]
        self._wide = self._clip.width + self._sam.width
        self._project = mm.linear(name, shape=(width, self._wide))
        self._line_end, self._image_end = (
            first_table(w, *names, shape=(width,)).to(w.dtype) for names in (LINE_END, IMAGE_END)
        )
        self.limits = ImageLimits(images.most_rows, images.largest, width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        """The tiles of all images are encoded together, before the whole images."""
        views = self.images.views(self.images.largest.grid)
        most = images * max(each.patches for each in views)
        rows = images * self.limits.rows
        results = 4 * rows * (4 * self.limits.width + self._wide)
        return results + self._sam.nbytes(most) + self._clip.nbytes(rows)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        features = partial(self._features, pause=pause)
        lines = of_all_views(self.images.views(grid), pixels, features)
        return torch.cat([lines, self._image_end.expand(len(pixels), 1, -1)], dim=1)

    def _features(self, pixels: Tensor, views: EqualViews, pause: Pause) -> Tensor:
        """pixels [images, views, patches, ...] -> [images, rows, width]: the lines of all views
        side by side, each with its end."""
        first = self._sam(pixels.flatten(0, 1), views.rows, pause)
        both = torch.cat([self._clip(first, pause), first], dim=2).flatten(0, 1)
        rows = both.new_empty(len(both), self.limits.width)
        for part in slabs(both, pause):
            rows[part] = self._project(both[part])
        images, (down, right), edge = len(pixels), views.grid, isqrt(first.shape[1])
        cells = rows.view(images, down, right, edge, edge, -1).transpose(2, 3)
        lines = cells.reshape(images, down * edge, right * edge, -1)
        ends = self._line_end.expand(images, down * edge, 1, -1)
        return torch.cat([lines, ends], dim=2).flatten(1, 2)


class RowClip:
    """CLIP whose patches are rows of another encoder, which are as wide."""

    def __init__(self, w: TensorScope, metadata: Metadata, width: int) -> None:
        others = {} if metadata.architecture == "clip" else OLLAMA_HEADS
        stated = VisionSizes.read(metadata, eps=EPS, others=others, patch=1)
        self._sizes = sizes = replace(stated, eps=EPS)
        self._device, self.width = w.device, sizes.hidden
        if sizes.hidden != width:
            raise metadata.error(
                "vision.embedding_length",
                f"is {sizes.hidden:,}, where rows have {width:,} elements",
            )
        w.ignore("patch_embd")
        self._class = first_table(w, "class_embd", shape=(sizes.hidden,)).to(w.dtype)
        self._class_place, self._places = _places(w, sizes)
        self._norm = w.layer_norm(known_as(w, "pre_ln", "pre_layrnorm"), EPS, size=sizes.hidden)
        self._layers = [
            plain_layer(w.scope("blk", index), sizes, NAMES, gelu_quick)
            for index in range(sizes.layers)
        ]

    def nbytes(self, rows: int) -> int:
        """Upper bound of the bytes that encoding so many rows takes, result included."""
        return 20 * rows * self.width + layers_bytes(
            self._device, self._sizes, self._layers, 2 * rows
        )

    def __call__(self, rows: Tensor, pause: Pause) -> Tensor:
        """rows [views, cells of a square, hidden] -> likewise."""
        views, count, hidden = rows.shape
        places = torch.cat([self._class_place, stretched(self._places, isqrt(count))])
        x = torch.cat([self._class.expand(views, 1, hidden), rows], dim=1)
        x = self._norm(x.add_(places.to(x.dtype)).flatten(0, 1))
        batch = ImageBatch(views, whole(count + 1), pause=pause)
        for layer in self._layers:
            x = layer(x, batch)
        return x.view(views, count + 1, hidden)[:, 1:]


def _places(w: TensorScope, sizes: VisionSizes) -> tuple[Tensor, Tensor]:
    """The position of the class [1, hidden], and those of a square [1, hidden, side, side]."""
    count = (w.shape("position_embd", dimensions=2) or (2,))[0]
    side = isqrt(count - 1)
    if side == 0 or count != side * side + 1:
        raise sizes.metadata.error(
            "projector_type", f"means a square and one more place, and the file has {count:,}"
        )
    table = w.table("position_embd.weight", shape=(count, sizes.hidden))
    return table[:1], table[1:].t().reshape(1, sizes.hidden, side, side)
