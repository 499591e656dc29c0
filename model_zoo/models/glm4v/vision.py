"""The vision models of GLM-4.1V and GLM-OCR: any aspect ratio, and a merger with a convolution."""

from dataclasses import replace

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.vision.image_attention import slabs
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import frame_embedding, row_convolution
from model_zoo.layers.vision.position_table import interpolating, position_table
from model_zoo.layers.vision.rectangle_tower import RectangleParts, RectangleTower
from model_zoo.layers.vision.rotary import halves_rotary
from model_zoo.layers.vision.vision_layer import VisionLayer, read_gated, read_layer, rms_norms
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu_erf, silu_mul
from runtime.vision.encoder import Pause

EPS, FRAMES = 1e-5, 2
FILE_FRAMES = ("patch_embd.weight", "patch_embd.weight.1")
OLLAMA_FRAMES = ("patch_embd_0.weight", "patch_embd_1.weight")
EPS_KEY = "vision.attention.layer_norm_epsilon"
OLLAMA_EPS_KEY = "vision.attention.layer_norm_rms_epsilon"
# The epsilon of torch's norms, which the merger has.
MERGER_EPS = 1e-5


def glm4v_tower(w: TensorScope, metadata: Metadata, images: ImageBounds) -> RectangleTower:
    """Queries and keys of GLM-OCR are normed, and its positions are those of the rotation; other
    models norm patches and also have a table of positions."""
    v = w.scope("v")
    eps_key = EPS_KEY if metadata.architecture == "clip" else OLLAMA_EPS_KEY
    sizes, side = VisionSizes.read(metadata, eps=EPS, eps_key=eps_key), merged_side(metadata)
    embed = frame_embedding(v, sizes, *(OLLAMA_FRAMES if v.has("patch_embd_0") else FILE_FRAMES))
    normed_heads = v.has("blk.0.attn_q_norm")
    head_eps = sizes.eps if normed_heads else None
    parts = RectangleParts(
        sizes,
        side,
        embed,
        [_layer(v.scope("blk", i), sizes, head_eps) for i in range(sizes.layers)],
        Merger(w, sizes, side),
        rotary=halves_rotary(w, sizes),
    )
    if not normed_heads:
        norm = v.rms_norm("norm_embd", sizes.eps, size=sizes.hidden)
        places = interpolating(position_table(v, sizes), mode="bicubic")
        parts = replace(parts, embed=lambda x: norm(embed(x)), stretched=places)
    return RectangleTower(w, parts, images)


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
