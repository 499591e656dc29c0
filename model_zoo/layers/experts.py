"""Mixtures of experts: a router chooses a few feed-forwards for each row."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import Routes, RowWise
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.linear import Linear, for_factors
from model_zoo.layers.low_rank import LowRank
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.routing import SOFTMAX_OF_CHOSEN, Router
from model_zoo.layers.tensor_parallel import divided_width
from model_zoo.layers.text_sizes import TextSizes
from runtime.distributed.ranks import Split, evenly
from runtime.kernels.activations import Activations, unrounded
from runtime.kernels.embedding import groups_of
from runtime.kernels.experts import expert_products, weighted_sum
from runtime.kernels.pointwise import Gate, add_, mul, scale_, silu_mul, take_rows
from runtime.quant.block_types import TILE_ROWS
from runtime.quant.weight import Compute, Weight

# More experts than any model has; limits the allocation for a damaged count.
MAX_EXPERTS = 4096
_PANEL = 512  # kernels pad packed rows to multiples of this
_BOOKKEEPING = 96  # elements that sorting a row by expert takes


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The number of experts, how many of them a row uses, and their inner width.

    width: None if the file states none; it is then that of its tensors.
    """

    count: int
    used: int
    width: int | None

    @classmethod
    def read(cls, metadata: Metadata, layer: int = 0) -> "ExpertSizes":
        """layer: the one whose sizes are read where the file lists those of each layer.

        Raises ModelFileError for missing or impossible counts.
        """
        count = metadata.require_size("expert_count", at_most=MAX_EXPERTS)
        used = metadata.require_size_of("expert_used_count", layer, at_most=count)
        key = "expert_feed_forward_length"
        width = metadata.require_size_of(key, layer) if metadata.has(key) else None
        return cls(count, used, width)


@dataclass(frozen=True, slots=True)
class ChunkExperts:
    """Smaller experts, of inner width `width`, each of which belongs to `per_group` consecutive
    experts: what it computes, times `scale`, is added for each of these that is chosen, with its
    weight (Wu et al., "GroveMoE", section 3)."""

    per_group: int
    width: int
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class ExpertOptions:
    """The properties of experts that differ between families.

    routing: maps the router's logits to the experts of each row and their weights.
    gated: as in `GatedFeedForward`. curve: applied to ups instead, in experts without gates.
    weigh_input: the weights multiply the inputs of the experts instead of their outputs.
    alternating: in a tensor with gates and ups, their rows alternate; otherwise gates come first.
    shared: a feed-forward for every row, whose output is added. output_scale: factor of the sum.
    router_norm, norm: norms of the inputs of the router and of the experts.
    down_scale: float32 [experts], multiplies the experts' outputs, additions of adapters included.
    latent: size of the experts' inputs and outputs, if they are not those of the layer:
    `ffn_latent_down` maps its input to theirs, and `ffn_latent_up` the weighted sum back.
    chunks: experts of groups beside them.
    """

    routing: Router = SOFTMAX_OF_CHOSEN
    gated: Gate = silu_mul
    curve: Callable[[Tensor], Tensor] | None = None
    weigh_input: bool = False
    alternating: bool = False
    shared: RowWise | None = None
    output_scale: float | None = None
    router_norm: RMSNorm | None = None
    norm: RMSNorm | None = None
    down_scale: Tensor | None = None
    latent: int | None = None
    chunks: ChunkExperts | None = None


class Experts:
    """The weighted sum of down(gated(gate(x), up(x))), or of down(curve(up(x))), over the experts
    that a router chooses.

    Tensors such as `ffn_up_exps.scale` multiply the products with the matrices of each expert, if
    the file has them; that of `ffn_down_exps` is not read if there is a `down_scale`. The router is
    `ffn_gate_inp`. Files have gates and ups as two tensors or as one; the oldest have a matrix for
    each expert. Ranks divide the inner columns of every expert.
    """

    def __init__(
        self, w: TensorScope, hidden: int, sizes: ExpertSizes, options: ExpertOptions | None = None
    ) -> None:
        options = options or ExpertOptions()
        self.hidden, self._used, self._options = hidden, sizes.used, options
        self._router = w.linear("ffn_gate_inp", shape=(sizes.count, hidden))
        self._into, self._out_of = _latent_matrices(w, hidden, options.latent)
        inner = options.latent or hidden
        self._stacks = _Stacks(w, inner, replace(sizes, width=_width(w, sizes)), options)
        self._chunks = None if options.chunks is None else _Chunks(w, inner, sizes, options)
        self.row_elements, self.matrix_elements = self._summed_sizes(inner)
        first = self._stacks if self._into is None else self._into
        self.rounding = None if options.norm is not None else first.rounding

    @classmethod
    def read(
        cls, w: TensorScope, sizes: TextSizes, options: ExpertOptions | None = None
    ) -> "Experts":
        """The experts of a layer, with the counts that the file states."""
        return cls(w, sizes.hidden, ExpertSizes.read(sizes.metadata), options)

    def __call__(self, x: Activations) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.of_routes(x, self.routes(unrounded(x)))

    def routes(self, x: Tensor) -> Routes:
        """The choices of the router for x [tokens, hidden]."""
        norm = self._options.router_norm
        logits = self._router(x.float() if norm is None else norm(x.float()))
        return self._options.routing(logits, self._used)

    def of_routes(self, x: Activations, routes: Routes) -> Tensor:
        """As `__call__`, with choices that another vector may have led to."""
        options = self._options
        x = x if options.norm is None else options.norm(unrounded(x))
        inner = x if self._into is None else self._into(x)
        result = self._stacks(inner, routes)
        if self._chunks is not None:
            result = add_(result, self._chunks(inner, routes))
        if self._out_of is not None:
            result = self._out_of(result)
        result = result if options.shared is None else add_(result, options.shared(x))
        return result if options.output_scale is None else scale_(result, options.output_scale)

    def _summed_sizes(self, inner: int) -> tuple[int, int]:
        """`row_elements` and `matrix_elements`, as of `RowWise`."""
        options, hidden = self._options, self.hidden
        rows, matrix = self._stacks.row_elements, self._stacks.matrix_elements
        rows += hidden if options.norm is not None else 0
        rows += 2 * (hidden + inner) if options.latent else 0
        if self._chunks is not None:
            rows += inner + self._chunks.row_elements
            matrix = max(matrix, self._chunks.matrix_elements)
        if options.shared is not None:
            rows += hidden + options.shared.row_elements
            matrix = max(matrix, options.shared.matrix_elements)
        return rows, matrix


def experts_or_dense(
    w: TensorScope, sizes: TextSizes, index: int, options: ExpertOptions | None = None
) -> RowWise:
    """Experts if the file states a number of experts, else SwiGLU."""
    if not sizes.metadata.get("expert_count", int, 0):
        return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    return Experts.read(w, sizes, options)


class DenseAndExperts:
    """The sum of a dense feed-forward and experts, each between its own norms."""

    def __init__(
        self,
        norm: RMSNorm,
        dense: RowWise,
        dense_norm: RMSNorm,
        experts: Experts,
        experts_norm: RMSNorm,
    ) -> None:
        self._norm, self._dense, self._dense_norm = norm, dense, dense_norm
        self._experts, self._experts_norm = experts, experts_norm
        self.row_elements = 2 * experts.hidden + max(dense.row_elements, experts.row_elements)
        self.matrix_elements = max(dense.matrix_elements, experts.matrix_elements)
        self.rounding: Compute | None = None

    def __call__(self, x: Activations) -> Tensor:
        """x [tokens, hidden], not normed -> [tokens, hidden]."""
        x = unrounded(x)
        result = self._dense_norm(self._dense(self._norm(x)))
        return add_(result, self._experts_norm(self._experts(x)))


class _Stacks:
    """The matrices of all experts, in tensors such as `ffn_up_exps`, whose names end in `name`."""

    def __init__(
        self,
        w: TensorScope,
        hidden: int,
        sizes: ExpertSizes,
        options: ExpertOptions,
        name: str = "exps",
    ) -> None:
        width, count = sizes.width, sizes.count
        self._options, down = options, f"ffn_down_{name}"
        split = divided_width(w, width or 0, down)
        self._gate, self._up = _gates_and_ups(w, (count, width, hidden), split, options, name)
        scaled = options.down_scale is not None
        self._down = _Downs(w, down, (count, hidden, width), split, scaled=scaled)
        parts = (self._gate, self._up, self._down)
        self.row_elements = _row_elements(hidden, split.count, sizes)
        self.row_elements += self._down.row_elements * sizes.used
        self.row_elements += sizes.used * max(
            part.added_elements for part in parts if part is not None
        )
        self.matrix_elements = count * hidden * split.count
        self.rounding = (self._gate or self._up).weight.rounding

    def __call__(self, x: Activations, routes: Routes) -> Tensor:
        """x [tokens, hidden] -> the weighted sums [tokens, hidden], complete."""
        (chosen, weights), options = routes, self._options
        result = weighted_sum(
            self._of_each(x, chosen, weights),
            None if options.weigh_input else weights,
            chosen=chosen,
            scales=options.down_scale,
        )
        return self._down.merged(result)

    def _of_each(self, x: Activations, chosen: Tensor, weights: Tensor) -> Tensor:
        """[tokens, used, hidden], or this rank's contribution to it."""
        scale = weights if self._options.weigh_input else None
        if self._gate is None:
            assert self._options.curve is not None
            return self._down(self._options.curve(self._up(x, chosen, scale)), chosen)
        gated = self._options.gated(self._gate(x, chosen, scale), self._up(x, chosen, scale))
        return self._down(gated, chosen)


class _Chunks:
    """The experts of groups, see `ChunkExperts`, in tensors such as `ffn_up_chexps`."""

    def __init__(
        self, w: TensorScope, hidden: int, sizes: ExpertSizes, options: ExpertOptions
    ) -> None:
        chunks = options.chunks
        assert chunks is not None and options.down_scale is None
        self._chunks = chunks
        own = ExpertSizes(sizes.count // chunks.per_group, sizes.used, chunks.width)
        self._stacks = _Stacks(w, hidden, own, options, "chexps")
        self.row_elements = self._stacks.row_elements + 3 * sizes.used
        self.matrix_elements = self._stacks.matrix_elements

    def __call__(self, x: Activations, routes: Routes) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]; routes: to the single experts."""
        chosen, weights = routes
        groups = groups_of(chosen, self._chunks.per_group)
        return scale_(self._stacks(x, (groups, weights)), self._chunks.scale)


class _Matrices:
    """weight (experts, out, in); bias float32 (experts, out) and factors float32 [experts] of the
    products, or None; additions of adapters."""

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        added: tuple[LowRank, ...],
        factors: Tensor | None,
    ) -> None:
        self.weight, self.bias, self.added, self.factors = weight, bias, added, factors

    @property
    def added_elements(self) -> int:
        """Temporary elements per row of one expert while the additions are computed."""
        return max((each.row_elements for each in self.added), default=0)

    @classmethod
    def read(
        cls,
        w: TensorScope,
        name: str,
        shape: tuple[int, int | None, int | None],
        *,
        outs: Split | None = None,
        tiled: bool = True,
    ) -> "_Matrices":
        """`tiled`: as of `TensorScope.experts`."""
        bias = w.table(f"{name}.bias", shape=shape[:2], optional=True, outs=outs)
        weight = w.experts(name, shape=shape, outs=outs, tiled=tiled)
        factors = w.expert_factors(name, shape[0])
        return cls(weight, bias, w.expert_additions(name, outs=outs), factors)

    def rows(self, which: slice) -> "_Matrices":
        """The selected rows of each expert, as a view."""
        weight = self.weight.outputs(*which.indices(self.weight.shape[1]))
        bias = None if self.bias is None else self.bias[:, which].contiguous()
        added = tuple(each.rows(which) for each in self.added)
        return _Matrices(weight, bias, added, self.factors)

    def __call__(self, x: Activations, chosen: Tensor, scale: Tensor | None) -> Tensor:
        """x [tokens, in] or [tokens, used, in] -> [tokens, used, out]."""
        factors, wide = self._factors_of_pairs(chosen, scale), for_factors(x, self.factors)
        result = expert_products(wide, self.weight, chosen, bias=self.bias, scale=factors)
        result = result.to(unrounded(x).dtype)
        for each in self.added:
            result.add_(each.of_experts(x, chosen, scale))
        return result

    def _factors_of_pairs(self, chosen: Tensor, scale: Tensor | None) -> Tensor | None:
        """`scale` times the factors of the chosen experts, float32 [tokens, used]."""
        if self.factors is None:
            return scale
        rows = take_rows(self.factors.unsqueeze(1), chosen.flatten())
        factors = rows.view(chosen.shape)
        return factors if scale is None else mul(factors, scale)


class _Downs:
    """The matrices (experts, hidden, width) of `ffn_down_exps` or the like.

    Ranks divide the columns or, if a block extends over two parts, the rows; they then exchange the
    inputs. row_elements: temporary elements per row of one expert while ranks exchange it.
    added_elements: the same while additions of adapters are computed.
    """

    def __init__(
        self,
        w: TensorScope,
        name: str,
        shape: tuple[int, int, int | None],
        split: Split,
        *,
        scaled: bool,
    ) -> None:
        hidden = shape[1]
        self._ranks, self._ins = w.ranks, split
        by_columns = split.whole or split.falls_on(w.block_elements(name))
        self._outs = None if by_columns else evenly(hidden, w.ranks)
        bias = w.table(f"{name}.bias", shape=shape[:2], optional=True, outs=self._outs)
        if by_columns and w.ranks.rank > 0:
            bias = None  # rank 0 adds it
        ins = split if by_columns else None
        weight = w.experts(name, shape=shape, outs=self._outs, ins=ins)
        added = w.expert_additions(name, outs=self._outs, ins=ins)
        factors = None if scaled else w.expert_factors(name, shape[0])
        self._matrices = _Matrices(weight, bias, added, factors)
        self.added_elements = self._matrices.added_elements
        exchanged = 2 * (split.parts[-1][1] + hidden) if self._outs else (w.ranks.size + 1) * hidden
        self.row_elements = 0 if split.whole else exchanged

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [tokens, used, this rank's width] -> [tokens, used, hidden or some of it]."""
        if self._outs is not None:
            x = self._ranks.all_gather(x, self._ins.widths)
        return self._matrices(x, chosen, None)

    def merged(self, x: Tensor) -> Tensor:
        """The weighted sum over experts of this rank -> [tokens, hidden], complete."""
        if self._outs is not None:
            return self._ranks.all_gather(x, self._outs.widths)
        return self._ranks.all_reduce(x)


def _latent_matrices(
    w: TensorScope, hidden: int, latent: int | None
) -> tuple[Linear | None, Linear | None]:
    """[tokens, hidden] -> [tokens, latent], and the reverse; None without a latent size. The other
    names are those of Ollama's converter."""
    if latent is None:
        return None, None
    into = w.linear("ffn_latent_down", alt="ffn_latent_in", shape=(latent, hidden))
    return into, w.linear("ffn_latent_up", alt="ffn_latent_out", shape=(hidden, latent))


def _width(w: TensorScope, sizes: ExpertSizes) -> int | None:
    """The width as stated, or else that of the tensors; None if the file has neither."""
    if sizes.width is not None:
        return sizes.width
    names = ("ffn_gate_exps", 1), ("ffn_gate_up_exps", 2), ("ffn_gate.0", 1), ("ffn_up_exps", 1)
    for name, parts in names:
        shape = w.shape(name)
        if shape is not None and len(shape) > 1 and shape[-2]:
            return max(1, shape[-2] // parts)
    return None


def _gates_and_ups(
    w: TensorScope,
    shape: tuple[int, int | None, int],
    split: Split,
    options: ExpertOptions,
    name: str,
) -> tuple[_Matrices | None, _Matrices]:
    gate_name, up_name, whole = (f"ffn_{part}_{name}" for part in ("gate", "up", "gate_up"))
    if options.curve is not None:
        return None, _Matrices.read(w, up_name, shape, outs=split)
    if not w.has(whole):
        gate, up = (_Matrices.read(w, each, shape, outs=split) for each in (gate_name, up_name))
        return gate, up
    count, width, hidden = shape
    both_shape = count, None if width is None else 2 * width, hidden
    if options.alternating:
        both = _Matrices.read(w, whole, both_shape, outs=split.times(2), tiled=False)
        return both.rows(slice(0, None, 2)), both.rows(slice(1, None, 2))
    if split.whole:
        halves_are_tiles = (width or 0) % TILE_ROWS == 0
        both = _Matrices.read(w, whole, both_shape, tiled=halves_are_tiles)
        half = both.weight.shape[1] // 2
        return both.rows(slice(0, half)), both.rows(slice(half, None))
    return (
        _Matrices.read(w, whole, both_shape, outs=split),
        _Matrices.read(w, whole, both_shape, outs=split.beginning_at(width or 0)),
    )


def _row_elements(hidden: int, width: int, sizes: ExpertSizes) -> int:
    """Temporary elements per row: rows are packed or bundled, multiplied and copied in other types,
    and routes are sorted."""
    wide = max(hidden, width)
    packed = -(-wide // _PANEL) * _PANEL
    of_each = 6 * width + 2 * hidden + 4 * wide + packed + _BOOKKEEPING
    return sizes.used * of_each + 2 * hidden + 8 * sizes.count
