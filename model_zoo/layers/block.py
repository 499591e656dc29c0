"""Blocks of text models: attention and feed-forward, each added to the residual."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.residual import Residual
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.activations import Activations
from runtime.kernels.pointwise import add_, take_rows
from runtime.quant.weight import Compute


class RowWise(Protocol):
    """x [tokens, hidden] -> [tokens, hidden], each row independently.

    row_elements: maximum number of temporary elements per row, besides x. matrix_elements: number
    of elements of the largest matrix. rounding: that of its products with x, see `Weight.rounding`;
    None if x is first changed.
    """

    row_elements: int
    matrix_elements: int
    rounding: Compute | None

    def __call__(self, x: Activations) -> Tensor: ...


# The experts of each row int64 [tokens, used], and their weights float32 [tokens, used].
Routes = tuple[Tensor, Tensor]


class Routed(RowWise, Protocol):
    """A feed-forward whose experts may be chosen before its input is known: from x [tokens, hidden]
    by `routes`, for `of_routes`, which is otherwise as `__call__`."""

    def routes(self, x: Tensor) -> Routes: ...

    def of_routes(self, x: Activations, routes: Routes) -> Tensor: ...


class Mixer(Protocol):
    """Mixes information between rows, such as attention: x [tokens, hidden] -> [tokens, hidden], or
    only [outputs, hidden] of `step.rows`. Sizes and rounding as in `RowWise`."""

    row_elements: int
    matrix_elements: int
    rounding: Compute | None

    def __call__(self, x: Activations, step: Step) -> Tensor: ...


class _TwoParts:
    """The sizes of blocks that compute an attention and then a feed-forward."""

    __slots__ = ()
    attention: Mixer
    feed_forward: RowWise

    @property
    def row_elements(self) -> int:
        return max(self.attention.row_elements, self.feed_forward.row_elements)

    @property
    def matrix_elements(self) -> int:
        return max(self.attention.matrix_elements, self.feed_forward.matrix_elements)


@dataclass(frozen=True, slots=True, eq=False)
class Block(_TwoParts):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    Norms that are None are left out. Post norms are applied to both outputs, which are then
    multiplied by `residual_scale`.
    """

    attn_norm: RMSNorm | LayerNorm | None
    attention: Mixer
    ffn_norm: RMSNorm | LayerNorm | None
    feed_forward: RowWise
    post_attention_norm: RMSNorm | None = None
    post_ffw_norm: RMSNorm | None = None
    residual_scale: float = 1.0

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same shape, or [outputs, hidden] if `step.rows` selects
        rows."""
        return self.unadded(Residual(x), step).computed()

    def unadded(self, residual: Residual, step: Step) -> Residual:
        """As `__call__`, with residuals whose sums the norms before and after the block compute."""
        attention, feed_forward = self.attention, self.feed_forward
        attended = attention(residual.normed(self.attn_norm, attention.rounding), step)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        residual = Residual(attended, step.kept(residual.x), self.residual_scale)
        added = feed_forward(residual.normed(self.ffn_norm, feed_forward.rounding))
        if self.post_ffw_norm is not None:
            added = self.post_ffw_norm(added)
        return Residual(added, residual.x, self.residual_scale)


@dataclass(frozen=True, slots=True, eq=False)
class MixerBlock:
    """x + mixer(norm(x)), for layers without a feed-forward."""

    norm: RMSNorm
    mixer: Mixer

    @property
    def row_elements(self) -> int:
        return self.mixer.row_elements

    @property
    def matrix_elements(self) -> int:
        return self.mixer.matrix_elements

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """As `Block.__call__`."""
        return self.unadded(Residual(x), step).computed()

    def unadded(self, residual: Residual, step: Step) -> Residual:
        """As `Block.unadded`."""
        mixed = self.mixer(residual.normed(self.norm, self.mixer.rounding), step)
        return Residual(mixed, step.kept(residual.x))


@dataclass(frozen=True, slots=True, eq=False)
class RowWiseBlock:
    """x + part(norm(x)) for each norm and part in turn, for layers without a mixer; without parts,
    x remains as it is."""

    parts: tuple[tuple[RMSNorm, RowWise], ...]

    @property
    def row_elements(self) -> int:
        return max((part.row_elements for _, part in self.parts), default=0)

    @property
    def matrix_elements(self) -> int:
        return max((part.matrix_elements for _, part in self.parts), default=0)

    def unadded(self, residual: Residual, rows: Tensor | None) -> Residual:
        """The residual, or only these rows of it; sums as of `Block.unadded`."""
        if rows is not None:
            residual = Residual(take_rows(residual.computed(), rows))
        for norm, part in self.parts:
            added = part(residual.normed(norm, part.rounding))
            residual = Residual(added, residual.x)
        return residual


@dataclass(frozen=True, slots=True, eq=False)
class EarlyRoutedBlock(_TwoParts):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), whose experts are those that the
    first x leads to."""

    attn_norm: RMSNorm
    attention: Mixer
    ffn_norm: RMSNorm
    feed_forward: Routed

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same shape, or [outputs, hidden] if `step.rows` selects
        rows."""
        kept = step.kept(x)
        routes = self.feed_forward.routes(kept)
        attended = self.attention(self.attn_norm(x), step)
        inputs = self.ffn_norm.of_sum(attended, kept)
        return add_(self.feed_forward.of_routes(inputs, routes), attended)


@dataclass(frozen=True, slots=True, eq=False)
class ParallelBlock(_TwoParts):
    """x + attention(norm(x)) + feed_forward(ffn_norm(x)); ffn_norm: None for the same norm."""

    norm: RMSNorm | LayerNorm
    attention: Mixer
    feed_forward: RowWise
    ffn_norm: RMSNorm | LayerNorm | None = None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same shape, or [outputs, hidden] if `step.rows` selects
        rows."""
        normed, kept = self.norm(x), step.kept(x)
        inputs = step.kept(normed) if self.ffn_norm is None else self.ffn_norm(kept)
        return add_(add_(self.attention(normed, step), self.feed_forward(inputs)), kept)


@dataclass(frozen=True, slots=True, eq=False)
class PostNormBlock(_TwoParts):
    """norm(x + attention(x)), then norm(x + feed_forward(x)), as in BERT.

    attn_norm_2: of the sum of the first result and x again, which takes its place.
    """

    attention: Mixer
    attn_output_norm: LayerNorm
    feed_forward: RowWise
    layer_output_norm: LayerNorm
    attn_norm_2: LayerNorm | None = None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same shape, or [outputs, hidden] if `step.rows` selects
        rows."""
        before = step.kept(x)
        x = self.attn_output_norm.of_sum(self.attention(x, step), before)
        if self.attn_norm_2 is not None:
            x = self.attn_norm_2.of_sum(x, before)
        return self.layer_output_norm.of_sum(self.feed_forward(x), x)


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """pre_norms: norms of the inputs of attention and feed-forward. layer_norms: these are layer
    norms instead of RMS norms, which must have biases if `norm_biases`. post_norms: RMS norms of
    the outputs, whose epsilon is `post_norm_eps`, None for that of all norms. residual_scale:
    factor of both outputs. The others are names of norms."""

    pre_norms: bool = True
    layer_norms: bool = False
    norm_biases: bool = True
    post_norms: bool = False
    post_norm_eps: float | None = None
    residual_scale: float = 1.0
    ffn_norm: str = "ffn_norm"
    post_attention_norm: str = "post_attention_norm"
    post_ffw_norm: str = "post_ffw_norm"

    def read(
        self, w: TensorScope, sizes: TextSizes, attention: Mixer, feed_forward: RowWise
    ) -> Block:
        """The block with norms of the scope `w`."""
        norm = partial(w.rms_norm, eps=sizes.eps, size=sizes.hidden)
        before: list[RMSNorm | LayerNorm | None] = [None, None]
        if self.pre_norms and self.layer_norms:
            named = "attn_norm", self.ffn_norm
            if self.norm_biases:
                w.need_biases(*named)
            before = [w.layer_norm(name, sizes.eps, size=sizes.hidden) for name in named]
        elif self.pre_norms:
            before = [norm("attn_norm"), norm(self.ffn_norm)]
        after = partial(norm, eps=self.post_norm_eps or sizes.eps)
        return Block(
            before[0],
            attention,
            before[1],
            feed_forward,
            after(self.post_attention_norm) if self.post_norms else None,
            after(self.post_ffw_norm) if self.post_norms else None,
            self.residual_scale,
        )


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Attention and feed-forward beside each other after layer norms, whose biases are optional, or
    with `rms` after RMS norms. norm: the name of the first; ffn_norm: that of the feed-forward,
    None for the same norm."""

    norm: str = "attn_norm"
    ffn_norm: str | None = None
    rms: bool = False

    def read(
        self, w: TensorScope, sizes: TextSizes, attention: Mixer, feed_forward: RowWise
    ) -> ParallelBlock:
        """As `BlockOptions.read`."""
        names = [self.norm, *filter(None, (self.ffn_norm,))]
        norms: list[RMSNorm | LayerNorm] = [
            w.rms_norm(name, sizes.eps, size=sizes.hidden)
            if self.rms
            else w.layer_norm(name, sizes.eps, size=sizes.hidden)
            for name in names
        ]
        return ParallelBlock(norms[0], attention, feed_forward, *norms[1:])
