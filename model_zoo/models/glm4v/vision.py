"""The vision models of GLM-4.1V and GLM-OCR: any aspect ratio, and a merger with a convolution."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds, blank
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, slabs, whole
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import frame_embedding, row_convolution
from model_zoo.layers.vision.rotary import coordinates, halves_rotary
from model_zoo.layers.vision.square_places import add_places_, square_places
from model_zoo.layers.vision.vision_layer import (
    VisionLayer,
    layers_bytes,
    read_gated,
    read_layer,
    rms_norms,
)
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu_erf, silu_mul
from runtime.vision.encoder import ImageLimits, Pause, PreparedImage, no_pause

EPS, FRAMES = 1e-5, 2
FILE_FRAMES = ("patch_embd.weight", "patch_embd.weight.1")
OLLAMA_FRAMES = ("patch_embd_0.weight", "patch_embd_1.weight")
EPS_KEY = "vision.attention.layer_norm_epsilon"
OLLAMA_EPS_KEY = "vision.attention.layer_norm_rms_epsilon"
# The epsilon of torch's norms, which the merger has.
MERGER_EPS = 1e-5


class GlmTower:
    """See `VisionTower`. pixels [images, patches, channels * side * side].

    Patches that are merged are consecutive; these squares are in row-major order of the rectangle
    `grid`. Queries and keys of GLM-OCR are normed, and positions are those of the rotation; other
    models also have a table of positions.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        before = w.loaded_bytes
        eps_key = EPS_KEY if metadata.architecture == "clip" else OLLAMA_EPS_KEY
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS, eps_key=eps_key)
        self._device, self._dtype = w.device, w.dtype
        self._merge = merged_side(metadata)
        v = w.scope("v")
        names = OLLAMA_FRAMES if v.has("patch_embd_0") else FILE_FRAMES
        self._embed = frame_embedding(v, sizes, *names)
        normed_heads = v.has("blk.0.attn_q_norm")
        self._places = None if normed_heads else StretchedPlaces(v, sizes)
        self._rotary = halves_rotary(w, sizes)
        head_eps = sizes.eps if normed_heads else None
        self._layers = [_layer(v.scope("blk", i), sizes, head_eps) for i in range(sizes.layers)]
        self._merger = Merger(w, sizes, self._merge)
        self._largest = images.largest
        self.limits = ImageLimits(images.most_rows, self._merger.width, w.dtype)
        self.weight_bytes = w.loaded_bytes - before

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self._merge**2
        edges = rows * (2 * sizes.patch_elements + 5 * sizes.hidden)
        return 4 * (edges + 2 * merged * self.limits.width) + layers_bytes(
            self._device, sizes, [*self._layers, self._merger], rows
        )

    def largest(self) -> PreparedImage:
        return blank(self._largest)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, (rows, columns) = len(pixels), (side * self._merge for side in grid)
        x = self._embed(pixels.to(self._dtype).flatten(0, 1))
        down, across = coordinates(rows, columns, block=self._merge, device=x.device)
        if self._places is not None:
            x = self._places(x, rows, columns, down, across)
        batch = ImageBatch(
            images, whole(rows * columns), repeated(self._rotary(down, across), images), pause
        )
        for layer in self._layers:
            x = layer(x, batch)
        return self._merger(x, pause).view(images, grid[0] * grid[1], -1)


class StretchedPlaces:
    """Norms patches and adds positions: those of a table of a square, interpolated."""

    def __init__(self, w: TensorScope, sizes: VisionSizes) -> None:
        self._norm = w.rms_norm("norm_embd", sizes.eps, size=sizes.hidden)
        self._table = square_places(w, sizes)

    def __call__(self, x: Tensor, rows: int, columns: int, down: Tensor, across: Tensor) -> Tensor:
        """x [images * rows * columns, hidden] -> like x. down, across [rows * columns]: row and
        column of each patch of an image."""
        plane = F.interpolate(
            self._table, size=(rows, columns), mode="bicubic", align_corners=False
        )
        normed = self._norm(x)
        add_places_(normed, plane, down, across)
        return normed


class Merger:
    """Norms rows, merges each square of `side` x `side` of them by a convolution, and applies a
    projection and a feed-forward."""

    kept_elements = 0

    def __init__(self, w: TensorScope, sizes: VisionSizes, side: int) -> None:
        self._norm: RMSNorm = w.rms_norm("v.post_ln", sizes.eps, size=sizes.hidden)
        mm = w.scope("mm")
        self.width = width = (mm.shape("patch_merger") or (1,))[0]
        self._merge = row_convolution(mm, "patch_merger", hidden=sizes.hidden, out=width, side=side)
        self._each = side**2
        self._project = mm.linear("model.fc", shape=(width, width))
        self._post_norm = mm.layer_norm("post_norm", MERGER_EPS, size=width)
        inner = (mm.shape("up") or (width,))[0]
        self._feed_forward = GatedFeedForward(mm, hidden=width, size=inner, prefix="")
        normed = 3 * self._each * sizes.hidden
        self.row_elements = max(
            normed + width, 4 * width, 2 * width + self._feed_forward.row_elements
        )
        self.matrix_elements = max(
            self._each * sizes.hidden * width, self._feed_forward.matrix_elements
        )

    def __call__(self, x: Tensor, pause: Pause) -> Tensor:
        """x [rows, hidden] -> [rows / side^2, width]."""
        squares = x.view(-1, self._each, x.shape[1])
        merged = torch.empty(len(squares), self.width, dtype=x.dtype, device=x.device)
        for rows in slabs(squares, pause):
            joined = self._merge(self._norm(squares[rows]).flatten(1))
            projected = gelu_erf(self._post_norm(self._project(joined)))
            merged[rows] = self._feed_forward(projected)
        return merged


def of_a_frame(area: int) -> int:
    """An area in pixels of an image, where `area` counts all frames of a patch."""
    return -(-area // FRAMES)


def _layer(w: TensorScope, sizes: VisionSizes, head_eps: float | None) -> VisionLayer:
    feed_forward = read_gated(w, sizes, silu_mul)
    return read_layer(w, sizes, LayerNames(), rms_norms(w, sizes), feed_forward, head_eps=head_eps)
