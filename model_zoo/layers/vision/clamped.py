"""Vision layers whose matrices clamp inputs and outputs, as in Gemma 4."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Rotation
from model_zoo.layers.vision.image_attention import attend, slabs, whole
from model_zoo.layers.vision.vision_sizes import VisionSizes
from runtime.kernels.pointwise import gelu_mul
from runtime.vision.encoder import Pause, no_pause

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
# The matrices of a layer, in the order in which some files list their bounds.
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True, eq=False)
class ClampedBatch:
    """A batch of `images` images with equal numbers of rows, and the rotations of both halves of a
    head. pause: see `VisionTower.encode`."""

    images: int
    across: Rotation
    down: Rotation
    pause: Pause = no_pause

    def rotated(self, x: Tensor, rows: slice) -> Tensor:
        """x [n, heads, dim] of these rows of the batch -> like x."""
        halves = zip(x.chunk(2, dim=-1), (self.across, self.down), strict=True)
        return torch.cat(
            [
                Rotation(turn.cos[rows], turn.sin[rows], turn.pairs)(half.contiguous())
                for half, turn in halves
            ],
            dim=-1,
        )


class ClampedLinear:
    """x [rows, in] -> [rows, out], both clamped if the file has bounds.

    listed [4]: the bounds, if the file does not store them with the matrix.
    """

    def __init__(
        self, w: TensorScope, name: str, *, shape: tuple[int, int], listed: Tensor | None = None
    ) -> None:
        self._linear: Linear = w.linear(name, shape=shape)
        stated = [w.table(f"{name}.{bound}", shape=(1,), optional=True) for bound in BOUNDS]
        self._bounded = listed is not None or any(bound is not None for bound in stated)
        if listed is None:
            listed = torch.tensor([-inf, inf, -inf, inf], device=w.device)
        pairs = zip(stated, listed.split(1), strict=True)
        self._bounds = [other if bound is None else bound for bound, other in pairs]

    def __call__(self, x: Tensor) -> Tensor:
        if not self._bounded:
            return self._linear(x)
        least, most, lowest, highest = (bound.to(x.dtype) for bound in self._bounds)
        return self._linear(x.clamp(least, most)).clamp_(lowest, highest)


class HeadNormedAttention:
    """Softmax attention over all rows of an image with unscaled scores and a norm of each head."""

    def __init__(self, w: TensorScope, sizes: VisionSizes, bounds: Mapping[str, Tensor]) -> None:
        hidden = sizes.hidden
        self._heads, self._head_dim = sizes.heads, sizes.head_dim
        self._queries, self._keys, self._values, self.project = (
            ClampedLinear(w, name, shape=(hidden, hidden), listed=bounds.get(name))
            for name in MATRICES[:4]
        )
        norm = partial(w.rms_norm, eps=sizes.eps, size=sizes.head_dim)
        self._q_norm, self._k_norm = norm("attn_q_norm"), norm("attn_k_norm")
        self._v_norm = RMSNorm(None, sizes.eps)
        self.row_elements = 12 * hidden
        self.kept_elements = 4 * hidden + sizes.heads
        self.matrix_elements = hidden * hidden

    def __call__(self, x: Tensor, norm: RMSNorm, batch: ClampedBatch) -> Tensor:
        """x [rows of the batch, hidden], normed here -> the same, before the projection."""
        queries, keys, values = (torch.empty_like(x) for _ in range(3))
        for rows in slabs(x, batch.pause):
            seen = norm(x[rows])
            rotated = batch.rotated(self._q_norm(self._split(self._queries(seen))), rows)
            queries[rows] = rotated.flatten(1).mul_(sqrt(self._head_dim))  # cancels the scaling
            rotated = batch.rotated(self._k_norm(self._split(self._keys(seen))), rows)
            keys[rows] = rotated.flatten(1)
            values[rows] = self._v_norm(self._split(self._values(seen))).flatten(1)
        each = len(x) // batch.images
        shape = (batch.images, each, self._heads, self._head_dim)
        queries, keys, values = (part.view(shape) for part in (queries, keys, values))
        return attend(queries, keys, values, whole(each), batch.pause).reshape(x.shape)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self._heads, self._head_dim))


class ClampedFeedForward:
    """down(gelu(gate(x)) * up(x)); the width is that of the tensors."""

    def __init__(self, w: TensorScope, sizes: VisionSizes, bounds: Mapping[str, Tensor]) -> None:
        hidden = sizes.hidden
        size = (w.shape("ffn_up") or (hidden,))[0]
        shapes = ((size, hidden), (size, hidden), (hidden, size))
        self._gate, self._up, self._down = (
            ClampedLinear(w, name, shape=shape, listed=bounds.get(name))
            for name, shape in zip(MATRICES[4:], shapes, strict=True)
        )
        self.row_elements = 5 * size + 4 * hidden
        self.matrix_elements = size * hidden

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(gelu_mul(self._gate(x), self._up(x)))


class SandwichLayer:
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))).

    bounds: bounds by matrix name, if the file does not store them with the matrices.
    """

    def __init__(self, w: TensorScope, sizes: VisionSizes, bounds: Mapping[str, Tensor]) -> None:
        self._attention = HeadNormedAttention(w, sizes, bounds)
        self._feed_forward = ClampedFeedForward(w, sizes, bounds)
        norm = partial(w.rms_norm, eps=sizes.eps, size=sizes.hidden)
        self._norms = norm("ln1"), norm("attn_post_norm")
        self._ffn_norms = norm("ln2"), norm("ffn_post_norm")
        parts = (self._attention, self._feed_forward)
        self.row_elements = max(part.row_elements for part in parts)
        self.matrix_elements = max(part.matrix_elements for part in parts)
        self.kept_elements = self._attention.kept_elements

    def __call__(self, x: Tensor, batch: ClampedBatch) -> Tensor:
        """x [rows of the batch, hidden] -> x, overwritten."""
        before, after = self._norms
        ffn_before, ffn_after = self._ffn_norms
        seen = self._attention(x, before, batch)
        for rows in slabs(x, batch.pause):
            now = x[rows].add_(after(self._attention.project(seen[rows])))
            now.add_(ffn_after(self._feed_forward(ffn_before(now))))
        return x
