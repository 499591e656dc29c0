"""Layers of vision models, and the memory that they need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import RowWise
from model_zoo.layers.feed_forward import FeedForward, GatedFeedForward
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.vision.image_attention import (
    FUSED_QUERIES,
    FUSED_SCORES,
    SCORES_AT_ONCE,
    ImageAttention,
    ImageBatch,
    slab_rows,
    slabs,
)
from model_zoo.layers.vision.names import LayerNames, known_as
from model_zoo.layers.vision.vision_sizes import VisionSizes
from runtime.kernels.matmul import EXPANDED_ELEMENTS, SLAB_ELEMENTS
from runtime.kernels.native import library
from runtime.kernels.pointwise import Gate
from runtime.kernels.workspace import TWIN_BYTES_PER_WEIGHT

# The C kernels pad rows to multiples of this.
_PADDING = 512
ReadNorm = Callable[[str], RMSNorm | LayerNorm]


class LayerNeeds(Protocol):
    """row_elements: temporary elements per row of a slab. kept_elements: elements per row of the
    batch, besides the input. matrix_elements: elements of the largest matrix."""

    @property
    def row_elements(self) -> int: ...

    @property
    def kept_elements(self) -> int: ...

    @property
    def matrix_elements(self) -> int: ...


class LayerAttention(LayerNeeds, Protocol):
    """x [rows of the batch, hidden], normed here -> the same, before the projection."""

    @property
    def project(self) -> Callable[[Tensor], Tensor]: ...

    def __call__(self, x: Tensor, norm: RMSNorm | LayerNorm, batch: ImageBatch) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class VisionLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x)); gates [1] multiply both outputs."""

    attn_norm: RMSNorm | LayerNorm
    attention: LayerAttention
    ffn_norm: RMSNorm | LayerNorm
    feed_forward: RowWise
    attn_gate: Tensor | None = None
    ffn_gate: Tensor | None = None

    def __call__(self, x: Tensor, batch: ImageBatch) -> Tensor:
        """x [rows of the batch, hidden] -> x, overwritten."""
        seen = self.attention(x, self.attn_norm, batch)
        for rows in slabs(x, batch.pause):
            added = _weighed(self.attention.project(seen[rows]), self.attn_gate)
            now = x[rows].add_(added)
            now.add_(_weighed(self.feed_forward(self.ffn_norm(now)), self.ffn_gate))
        return x

    @property
    def row_elements(self) -> int:
        return max(self.attention.row_elements, self.feed_forward.row_elements)

    @property
    def kept_elements(self) -> int:
        return self.attention.kept_elements

    @property
    def matrix_elements(self) -> int:
        return max(self.attention.matrix_elements, self.feed_forward.matrix_elements)


def _weighed(added: Tensor, gate: Tensor | None) -> Tensor:
    return added if gate is None else added.mul_(gate.to(added.dtype))


def read_layer(
    w: TensorScope,
    sizes: VisionSizes,
    names: LayerNames,
    norm: ReadNorm,
    feed_forward: RowWise,
    *,
    attn_gate: Tensor | None = None,
    ffn_gate: Tensor | None = None,
    head_eps: float | None = None,
    kv_heads: int | None = None,
) -> VisionLayer:
    """The layer with the tensors of this scope; `norm` reads a norm by name. head_eps, kv_heads:
    see `ImageAttention`."""
    attention = ImageAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads,
        output=known_as(w, *names.output),
        whole=known_as(w, *names.whole),
        head_eps=head_eps,
        kv_heads=kv_heads,
    )
    return VisionLayer(
        norm(known_as(w, *names.attn_norm)),
        attention,
        norm(known_as(w, *names.ffn_norm)),
        feed_forward,
        attn_gate,
        ffn_gate,
    )


def layer_norms(w: TensorScope, sizes: VisionSizes) -> ReadNorm:
    return partial(w.layer_norm, eps=sizes.eps, size=sizes.hidden)


def rms_norms(w: TensorScope, sizes: VisionSizes) -> ReadNorm:
    return partial(w.rms_norm, eps=sizes.eps, size=sizes.hidden)


def read_feed_forward(
    w: TensorScope, sizes: VisionSizes, names: LayerNames, curve: Callable[[Tensor], Tensor]
) -> FeedForward:
    """A feed-forward without a gate; its width is that of the tensors.

    In some files the names of the two matrices are exchanged; their shapes show this.
    """
    up, down = known_as(w, *names.up), known_as(w, *names.down)
    last = w.shape(down)
    if last is not None and last[1:] == (sizes.hidden,) and last[0] != sizes.hidden:
        up, down = down, up
    first = w.shape(up)
    size = sizes.hidden if first is None else first[0]
    return FeedForward(w, hidden=sizes.hidden, size=size, curve=curve, up=up, down=down)


def plain_layer(
    w: TensorScope, sizes: VisionSizes, names: LayerNames, curve: Callable[[Tensor], Tensor]
) -> VisionLayer:
    """A layer with layer norms and a feed-forward without a gate."""
    feed_forward = read_feed_forward(w, sizes, names, curve)
    return read_layer(w, sizes, names, layer_norms(w, sizes), feed_forward)


def read_gated(w: TensorScope, sizes: VisionSizes, gated: Gate) -> GatedFeedForward:
    """A feed-forward with a gate; its width is that of the tensors."""
    shape = w.shape("ffn_up")
    size = shape[0] if shape else sizes.hidden
    return GatedFeedForward(w, hidden=sizes.hidden, size=size, gated=gated)


def layers_bytes(
    device: torch.device, sizes: VisionSizes, layers: Sequence[LayerNeeds], rows: int
) -> int:
    """Bytes that the layers allocate for `rows` rows of a batch, and their input.

    In float32, as kernels compute: five times the residual, and the widest step of a slab.
    """
    slab = min(rows, slab_rows(device))
    widest = max(layer.row_elements for layer in layers) + 2 * sizes.hidden + _PADDING
    kept = max(layer.kept_elements for layer in layers) + sizes.hidden
    matrix = max(layer.matrix_elements for layer in layers)
    return 4 * (rows * kept + slab * widest) + kernel_bytes(
        device, largest_matrix=matrix, head_dim=sizes.head_dim
    )


def kernel_bytes(device: torch.device, *, largest_matrix: int, head_dim: int) -> int:
    """Bytes that products and attention allocate besides their results, for any number of rows."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        fused = 4 * threads * (FUSED_SCORES + FUSED_QUERIES * (head_dim + 3))
    else:
        fused = 12 * SCORES_AT_ONCE
    known = device.type == "cpu" and library() is not None
    expanded = min(largest_matrix, EXPANDED_ELEMENTS if known else SLAB_ELEMENTS)
    return fused + TWIN_BYTES_PER_WEIGHT * expanded
