"""Vision model of MiniCPM-V 4.6: SigLIP on parts of an image, whose patches are merged two by two
between layers and again behind them."""

from functools import partial

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.equal_views import EqualViews
from model_zoo.layers.vision.image_attention import AttentionSpan, ImageAttention, ImageBatch, slabs
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.of_views import of_all_views
from model_zoo.layers.vision.rectangular_vit import MergedAfter, RectangularVit
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from runtime.kernels.pointwise import gelu
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS = 1e-6
# Patches along a side of the squares that are merged, each time and in all.
MERGE, SQUARE = 2, 4
SQUARE_KEY, LAYER_KEY = "vision.projector.scale_factor", "vision.wa_layer_indexes"


class MiniCPMV46Tower:
    """See `VisionTower`. pixels and grid: those of `MiniCPMVProcessor`. The rows of features are
    those of the parts, in order. images: the processor of its images."""

    def __init__(self, w: TensorScope, metadata: Metadata, images: MiniCPMVProcessor) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self.images = images
        layer = partial(plain_layer, sizes=sizes, names=LayerNames(), curve=gelu)
        v = w.scope("v")
        merged = MergedAfter(_merging_layer(sizes), WindowMerger(v.scope("vit_merger"), sizes))
        self._vit = RectangularVit(v, sizes, layer, merged)
        self._projector = _projector(w.scope("mm"), sizes.hidden * MERGE**2)
        self.limits = ImageLimits(images.most_rows, images.largest, self._projector.width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        """The slices of all images are one batch."""
        rows = images * self.limits.rows
        patches = rows * SQUARE**2
        pixels = patches * self._sizes.patch_elements
        return 4 * (3 * rows * self.limits.width + pixels) + self._vit.nbytes(
            patches, self._projector
        )

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        views = self.images.slicing.parts(*grid).views(self._sizes.patch)
        return of_all_views(views, pixels, partial(self._features, pause=pause))

    def _features(self, pixels: Tensor, views: EqualViews, pause: Pause) -> Tensor:
        """pixels [images, views, patches, ...] -> [images, their rows, width]."""
        order = nested_squares(views.rows, views.columns, device=pixels.device)
        seen = self._vit(pixels.flatten(0, 1), views.rows, views.columns, pause, order)
        projected = self._projector(seen.flatten(0, 1), pause)
        return projected.view(len(pixels), -1, self.limits.width)


def _projector(w: TensorScope, wide: int) -> RowProjector:
    between, width = (w.shape("up") or (wide,))[0], (w.shape("down") or (1,))[0]
    return RowProjector(
        w.linear("up", shape=(between, wide)),
        w.linear("down", shape=(width, between)),
        (wide, between, width),
        w.layer_norm("input_norm", EPS, size=wide),
        late=True,
    )


class WindowMerger:
    """See `RowMerger`. Rows of a square attend to each other. The mean of the square is added to
    what two layers make of its concatenated rows."""

    each = MERGE**2

    def __init__(self, w: TensorScope, sizes: VisionSizes) -> None:
        self._wide = wide = sizes.hidden * self.each
        self._attn_norm = w.layer_norm("ln1", sizes.eps, size=sizes.hidden)
        self._attention = ImageAttention(
            w, hidden=sizes.hidden, heads=sizes.heads, output="attn_out"
        )
        self._norm = w.layer_norm("ds_ln", sizes.eps, size=wide)
        self._layers = TwoLayers(w, wide, sizes.hidden)
        merging = 3 * wide + self._layers.row_elements
        self.row_elements = max(self._attention.row_elements, merging)
        self.kept_elements = self._attention.kept_elements + sizes.hidden
        self.matrix_elements = max(self._attention.matrix_elements, self._layers.matrix_elements)

    def __call__(self, x: Tensor, images: int, pause: Pause) -> Tensor:
        rows, hidden = x.shape
        count = rows // images
        windows = AttentionSpan(0, count, 0, count, parts=count // self.each)
        seen = self._attention(x, self._attn_norm, ImageBatch(images, (windows,), pause=pause))
        for part in slabs(x, pause):
            x[part].add_(self._attention.project(seen[part]))
        squares = x.view(-1, self.each, hidden)
        merged = squares.mean(1)
        for part in slabs(merged, pause):
            joined = self._norm(squares[part].flatten(1))
            merged[part].add_(self._layers(joined))
        return merged


class TwoLayers:
    """down(gelu(up(x))) of another width."""

    def __init__(self, w: TensorScope, wide: int, width: int) -> None:
        inner = (w.shape("ds_ffn_up") or (wide,))[0]
        self._up = w.linear("ds_ffn_up", shape=(inner, wide))
        self._down = w.linear("ds_ffn_down", shape=(width, inner))
        self.row_elements = 4 * inner + 2 * width
        self.matrix_elements = inner * max(wide, width)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, wide] -> [rows, width]."""
        return self._down(gelu(self._up(x)))


def nested_squares(rows: int, columns: int, *, device: torch.device) -> Tensor:
    """int64 [rows * columns]: numbers of patches in row-major order, ordered so that the four
    patches of a square are consecutive, and the four squares of a square of squares."""
    down, across = rows // SQUARE, columns // SQUARE
    numbers = torch.arange(rows * columns, device=device)
    nested = numbers.view(down, MERGE, MERGE, across, MERGE, MERGE)
    return nested.permute(0, 3, 1, 4, 2, 5).flatten()


def _merging_layer(sizes: VisionSizes) -> int:
    """The layer behind which patches are merged."""
    square = sizes.metadata.get_size(SQUARE_KEY, SQUARE)
    if square != SQUARE:
        raise sizes.metadata.error(
            SQUARE_KEY, f"is {square}; squares of {SQUARE} by {SQUARE} patches are supported"
        )
    listed = sizes.metadata.get_array(LAYER_KEY, int) or ()
    if len(listed) != 1 or not 0 <= listed[0] < sizes.layers:
        raise sizes.metadata.error(
            LAYER_KEY, f"is {listed[:8]}; one of {sizes.layers} layers is needed"
        )
    return listed[0]
