"""Feed-forward layers of many experts, of which a router chooses a few for each row."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import RowWise
from model_zoo.layers.dividing import divided_width
from model_zoo.layers.norm import RMSNorm
from runtime.distributed.ranks import Split, evenly
from runtime.kernels.experts import expert_products, weighted_sum
from runtime.kernels.pointwise import silu_mul
from runtime.quant.block_types import Weight

# More than any model has, and few enough that a damaged count asks for little.
MAX_EXPERTS = 4096
# Kernels pad packed rows to multiples of this; and what sorting a row by expert takes, in elements.
_PANEL = 512
_BOOKKEEPING = 96
# logits float32 [tokens, experts] and how many are used
# -> chosen int64 [tokens, used] and weights float32 [tokens, used]
Routing = Callable[[Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """How many experts a layer has, how many of them a row uses, and how wide they are.

    `width` is None where a file does not say; then its tensors tell.
    """

    count: int
    used: int
    width: int | None

    @classmethod
    def read(cls, metadata: Metadata, *, width: int | None = None) -> "ExpertSizes":
        """`width`: where the file has none for experts. ModelFileError for what cannot be."""
        count = metadata.require_size("expert_count", at_most=MAX_EXPERTS)
        used = metadata.require_size("expert_used_count", at_most=count)
        key = "expert_feed_forward_length"
        return cls(count, used, metadata.require_size(key) if metadata.has(key) else width)


def softmax_of_all(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Each of the chosen weighs what it has of the softmax over all experts.

    Shazeer et al., "Outrageously Large Neural Networks", before the sum is made one again.
    """
    chosen = _highest(logits, used)
    return chosen, logits.softmax(dim=-1).gather(1, chosen)


def softmax_of_chosen(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """The softmax over the chosen alone: that over all experts, divided by its sum."""
    chosen = _highest(logits, used)
    return chosen, logits.gather(1, chosen).softmax(dim=-1)


def stated_softmax(metadata: Metadata) -> Routing:
    """Whichever softmax the file means: the chosen sum to one unless it says otherwise.

    There are two spellings of that; where they differ, `norm_top_k_prob` holds.
    """
    renormalised = metadata.get("expert_weights_norm", bool, True)
    renormalised = metadata.get("norm_top_k_prob", bool, renormalised)
    return softmax_of_chosen if renormalised else softmax_of_all


def sigmoid_of_chosen(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Each of the chosen by itself, as in Llama 4."""
    chosen = _highest(logits, used)
    # Not torch's sigmoid, whose last bit goes by where in memory a number lies.
    return chosen, 1 / (1 + logits.gather(1, chosen).neg().exp())


class Experts:
    """sum over the chosen of weight * down(gated(gate(x), up(x))), each with its own matrices.

    The router `ffn_gate_inp` and `routing` choose. With `weigh_input` the weights multiply what
    goes into the experts instead of what comes out. `shared` sees every row and is added. Files
    have gates and ups as two tensors or as one, where their rows are halves or, with
    `alternating`, every other row is a gate's; the oldest have a matrix for each expert. What the
    router sees passes `router_norm`, and what the experts see `norm`, where there are any.
    `down_scale` float32 [experts] multiplies what comes out, where it has another name than
    `ffn_down_exps.scale`. Ranks divide the columns inside of every expert.
    """

    def __init__(
        self,
        w: TensorScope,
        *,
        hidden: int,
        sizes: ExpertSizes,
        routing: Routing = softmax_of_chosen,
        gated: Callable[[Tensor, Tensor], Tensor] = silu_mul,
        weigh_input: bool = False,
        alternating: bool = False,
        shared: RowWise | None = None,
        router_norm: RMSNorm | None = None,
        norm: RMSNorm | None = None,
        down_scale: Tensor | None = None,
    ) -> None:
        self.hidden = hidden
        self._used, self._routing, self._gated = sizes.used, routing, gated
        self._weigh_input, self._shared = weigh_input, shared
        self._router_norm, self._norm = router_norm, norm
        self._router = w.linear("ffn_gate_inp", shape=(sizes.count, hidden))
        width = _width(w, sizes)
        self._split = divided_width(w, width or 0, "ffn_down_exps")
        self._gate, self._up = _gates_and_ups(
            w, sizes.count, width, hidden, self._split, alternating=alternating
        )
        self._down = _Downs(w, (sizes.count, hidden, width), self._split)
        scale = w.table("ffn_down_exps.scale", shape=(sizes.count,), optional=True)
        self._down_scale = down_scale if scale is None else scale
        self.row_elements = _row_elements(hidden, self._split.count, sizes)
        self.row_elements += self._down.row_elements * sizes.used
        self.row_elements += hidden if norm is not None else 0
        self.matrix_elements = sizes.count * hidden * self._split.count
        if shared is not None:
            self.row_elements += hidden + shared.row_elements
            self.matrix_elements = max(self.matrix_elements, shared.matrix_elements)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        chosen, weights = self._routed(x)
        x = x if self._norm is None else self._norm(x)
        factors = torch.ones_like(weights) if self._weigh_input else weights
        if self._down_scale is not None:
            factors = factors * self._down_scale[chosen]
        result = self._down.merged(weighted_sum(self._of_each(x, chosen, weights), factors))
        return result if self._shared is None else result.add_(self._shared(x))

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = x.float() if self._router_norm is None else self._router_norm(x.float())
        return self._routing(self._router(seen), self._used)

    def _of_each(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[tokens, used, hidden], or of it what this rank contributes."""
        scale = weights if self._weigh_input else None
        gated = self._gated(self._gate(x, chosen, scale), self._up(x, chosen, scale))
        return self._down(gated, chosen)


class DenseAndExperts:
    """The sum of a dense feed-forward and of experts, each between norms of its own."""

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

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden], not normalised -> [tokens, hidden]."""
        result = self._dense_norm(self._dense(self._norm(x)))
        return result.add_(self._experts_norm(self._experts(x)))


class _Matrices:
    """weight (experts, out, in), bias float32 (experts, out) or none."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def read(
        cls,
        w: TensorScope,
        name: str,
        shape: tuple[int, int | None, int | None],
        *,
        outs: Split | None = None,
    ) -> "_Matrices":
        bias = w.table(f"{name}.bias", shape=shape[:2], optional=True, outs=outs)
        return cls(w.experts(name, shape=shape, outs=outs), bias)

    def rows(self, which: slice) -> "_Matrices":
        """Some rows of each expert, as a view."""
        data = self.weight.data[:, which]
        shape = (*data.shape[:2], self.weight.shape[2])
        bias = None if self.bias is None else self.bias[:, which].contiguous()
        return _Matrices(Weight(data, self.weight.type, shape), bias)

    def __call__(self, x: Tensor, chosen: Tensor, scale: Tensor | None) -> Tensor:
        """x [tokens, in] or [tokens, used, in] -> [tokens, used, out]."""
        return expert_products(x, self.weight, chosen, bias=self.bias, scale=scale)


class _Downs:
    """The matrices (experts, hidden, width) that follow, of which ranks have some columns; where
    blocks lie across the bounds of these, some rows, and ranks exchange what goes in.

    `row_elements`: how many elements a row of one expert needs at once while ranks exchange it.
    """

    def __init__(self, w: TensorScope, shape: tuple[int, int, int | None], split: Split) -> None:
        name, hidden = "ffn_down_exps", shape[1]
        self._ranks, self._ins = w.ranks, split
        by_columns = split.whole or split.falls_on(w.block_elements(name))
        self._outs = None if by_columns else evenly(hidden, w.ranks)
        bias = w.table(f"{name}.bias", shape=shape[:2], optional=True, outs=self._outs)
        if by_columns and w.ranks.rank > 0:
            bias = None  # it is added once
        ins = split if by_columns else None
        self._matrices = _Matrices(w.experts(name, shape=shape, outs=self._outs, ins=ins), bias)
        exchanged = 2 * (split.parts[-1][1] + hidden) if self._outs else (w.ranks.size + 1) * hidden
        self.row_elements = 0 if split.whole else exchanged

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [tokens, used, this rank's width] -> [tokens, used, hidden or some of it]."""
        if self._outs is not None:
            x = self._ranks.all_gather(x, self._ins.widths)
        return self._matrices(x, chosen, None)

    def merged(self, x: Tensor) -> Tensor:
        """The weighted sum over experts, of this rank -> [tokens, hidden] of all."""
        if self._outs is not None:
            return self._ranks.all_gather(x, self._outs.widths)
        return self._ranks.all_reduce(x)


def _width(w: TensorScope, sizes: ExpertSizes) -> int | None:
    """As the file says, else as the gates have it; None where neither does."""
    if sizes.width is not None:
        return sizes.width
    for name, parts in (("ffn_gate_exps", 1), ("ffn_gate_up_exps", 2), ("ffn_gate.0", 1)):
        shape = w.shape(name)
        if shape is not None and len(shape) > 1 and shape[-2]:
            return max(1, shape[-2] // parts)
    return None


def _gates_and_ups(
    w: TensorScope, count: int, width: int | None, hidden: int, split: Split, *, alternating: bool
) -> tuple[_Matrices, _Matrices]:
    if not w.has("ffn_gate_up_exps"):
        gate, up = (
            _Matrices.read(w, name, (count, width, hidden), outs=split)
            for name in ("ffn_gate_exps", "ffn_up_exps")
        )
        return gate, up
    shape = count, None if width is None else 2 * width, hidden
    if alternating:
        both = _Matrices.read(w, "ffn_gate_up_exps", shape, outs=split.times(2))
        return both.rows(slice(0, None, 2)), both.rows(slice(1, None, 2))
    if split.whole:
        both = _Matrices.read(w, "ffn_gate_up_exps", shape)
        half = both.weight.shape[1] // 2
        return both.rows(slice(0, half)), both.rows(slice(half, None))
    return (
        _Matrices.read(w, "ffn_gate_up_exps", shape, outs=split),
        _Matrices.read(w, "ffn_gate_up_exps", shape, outs=split.beginning_at(width or 0)),
    )


def _highest(logits: Tensor, used: int) -> Tensor:
    """[tokens, used] int64: the highest first, of equal ones the first expert first."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :used]


def _row_elements(hidden: int, width: int, sizes: ExpertSizes) -> int:
    """Rows are packed or bundled, multiplied, copied in other types; routes are sorted."""
    wide = max(hidden, width)
    packed = -(-wide // _PANEL) * _PANEL
    of_each = 6 * width + 2 * hidden + 4 * wide + packed + _BOOKKEEPING
    return sizes.used * of_each + 2 * hidden + 8 * sizes.count
