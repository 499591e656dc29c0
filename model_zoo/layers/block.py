"""A layer of a decoder: attention and feed-forward, each added to what came in."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.sizes import Sizes
from model_zoo.layers.step import Step


class RowWise(Protocol):
    """x [tokens, hidden] -> [tokens, hidden], each row by itself.

    `row_elements`: how many elements a row needs at once at most, beside x; `matrix_elements`: the
    largest matrix that it multiplies by.
    """

    row_elements: int
    matrix_elements: int

    def __call__(self, x: Tensor) -> Tensor: ...


class Mixer(Protocol):
    """What lets rows see others, such as attention: x [tokens, hidden] -> [tokens, hidden], or
    [outputs, hidden] of `step.rows` alone; sizes as of `RowWise`."""

    row_elements: int
    matrix_elements: int

    def __call__(self, x: Tensor, step: Step) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """x + attention(norm(x)), then that + feed_forward(norm(that)).

    Norms that are None are left out; the post norms are applied to what is added, which is then
    multiplied by `residual_scale`.
    """

    attn_norm: RMSNorm | LayerNorm | None
    attention: Mixer
    ffn_norm: RMSNorm | LayerNorm | None
    feed_forward: RowWise
    post_attention_norm: RMSNorm | None = None
    post_ffw_norm: RMSNorm | None = None
    residual_scale: float = 1.0

    @property
    def row_elements(self) -> int:
        return max(self.attention.row_elements, self.feed_forward.row_elements)

    @property
    def matrix_elements(self) -> int:
        return max(self.attention.matrix_elements, self.feed_forward.matrix_elements)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same, or [outputs, hidden] of `step.rows` alone."""
        attended = self.attention(x if self.attn_norm is None else self.attn_norm(x), step)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        x = self._scaled(attended).add_(step.kept(x))
        added = self.feed_forward(x if self.ffn_norm is None else self.ffn_norm(x))
        if self.post_ffw_norm is not None:
            added = self.post_ffw_norm(added)
        return self._scaled(added).add_(x)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1.0 else x.mul_(self.residual_scale)


@dataclass(frozen=True, slots=True, eq=False)
class ParallelBlock:
    """x + attention(norm(x)) + feed_forward(norm(x))."""

    norm: RMSNorm | LayerNorm
    attention: Mixer
    feed_forward: RowWise

    @property
    def row_elements(self) -> int:
        return max(self.attention.row_elements, self.feed_forward.row_elements)

    @property
    def matrix_elements(self) -> int:
        return max(self.attention.matrix_elements, self.feed_forward.matrix_elements)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same, or [outputs, hidden] of `step.rows` alone."""
        normed = self.norm(x)
        added = self.attention(normed, step).add_(self.feed_forward(step.kept(normed)))
        return added.add_(step.kept(x))


@dataclass(frozen=True, slots=True, eq=False)
class PostNormBlock:
    """norm(x + attention(x)), then norm(that + feed_forward(that)); the older order of encoders."""

    attention: Mixer
    attn_output_norm: LayerNorm
    feed_forward: RowWise
    layer_output_norm: LayerNorm

    @property
    def row_elements(self) -> int:
        return max(self.attention.row_elements, self.feed_forward.row_elements)

    @property
    def matrix_elements(self) -> int:
        return max(self.attention.matrix_elements, self.feed_forward.matrix_elements)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same, or [outputs, hidden] of `step.rows` alone."""
        x = self.attn_output_norm(self.attention(x, step).add_(step.kept(x)))
        return self.layer_output_norm(self.feed_forward(x).add_(x))


def read_block(
    w: TensorScope,
    sizes: Sizes,
    attention: Mixer,
    feed_forward: RowWise,
    *,
    pre_norms: bool = True,
    post_norms: bool = False,
    residual_scale: float = 1.0,
) -> Block:
    """The block with RMSNorms of the usual names.

    pre_norms: of the inputs of attention and feed-forward. post_norms: of their outputs.
    """
    norm = partial(w.rms_norm, eps=sizes.eps, size=sizes.hidden)
    return Block(
        norm("attn_norm") if pre_norms else None,
        attention,
        norm("ffn_norm") if pre_norms else None,
        feed_forward,
        norm("post_attention_norm") if post_norms else None,
        norm("post_ffw_norm") if post_norms else None,
        residual_scale,
    )
