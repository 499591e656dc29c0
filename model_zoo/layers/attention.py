"""Self-attention with grouped queries over the paged cache."""

from dataclasses import dataclass

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.dividing import divided_heads
from model_zoo.layers.norm import AcrossHeads, RMSNorm
from model_zoo.layers.step import Step
from runtime.distributed.ranks import HeadSplit, Split
from runtime.kernels.attention import paged_attention, write_cache
from runtime.kernels.pointwise import sigmoid_mul
from runtime.kv.spec import LayerCache


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries grow with position p by 1 + beta * ln(1 + floor((p + offset) / span)).

    Nakanishi, "Scalable-Softmax Is Superior for Attention", as Llama 4 and Ministral 3 use it.
    """

    beta: float
    span: float
    offset: int = 0

    def __call__(self, positions: Tensor) -> Tensor:
        """positions [tokens] int64 -> float32 [tokens, 1, 1]."""
        spans = ((positions + self.offset).float() / self.span).floor()
        return (1 + self.beta * spans.log1p())[:, None, None]


class SelfAttention:
    """Softmax attention of `heads` query heads over what `cache` declares, then a projection.

    Ranks divide the heads; `heads`, `cache` and `sinks` are those of all.
    Queries and keys pass, where given, `q_norm` and `k_norm`, the step's rotation,
    `turned_norm`; queries are then multiplied by `temperature` of their position and the products
    by `scale`. Values pass `v_norm`. `softcap`, `sinks`: see `paged_attention`. `output`: name of
    the projection. With `stores` False there are no keys and values here: the step's pages are
    another layer's. With `keys_as_values` a file without `attn_v` has its bare keys as values. With
    `output_gate` the rows of each head's gate stand behind those of its query, and what the head
    has seen is multiplied by the sigmoid of its gate.
    """

    def __init__(
        self,
        w: TensorScope,
        *,
        hidden: int,
        heads: int,
        cache: LayerCache,
        scale: float,
        q_norm: RMSNorm | AcrossHeads | None = None,
        k_norm: RMSNorm | AcrossHeads | None = None,
        v_norm: RMSNorm | None = None,
        turned_norm: RMSNorm | None = None,
        temperature: Temperature | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        output: str = "attn_output",
        stores: bool = True,
        keys_as_values: bool = False,
        output_gate: bool = False,
    ) -> None:
        split = divided_heads(w, heads, cache)
        self._heads, self._kv_heads, self._scale = split.heads.count, split.kv_heads.count, scale
        self._q_norm, self._k_norm, self._v_norm = q_norm, k_norm, v_norm
        self._turned_norm, self._temperature = turned_norm, temperature
        self._softcap, self._output_gate = softcap, output_gate
        self._sinks = None if sinks is None else sinks[split.heads.begin : split.heads.end]
        shapes = {"attn_q": ((1 + output_gate) * heads * cache.key_dim, hidden)}
        if stores:
            shapes["attn_k"] = (cache.kv_heads * cache.key_dim, hidden)
        lacking = keys_as_values and not w.has("attn_v") and not w.has("attn_qkv")
        if stores and not lacking:
            shapes["attn_v"] = (cache.kv_heads * cache.value_dim, hidden)
        self._qkv = w.fused_linear(
            shapes,
            whole="attn_qkv" if "attn_v" in shapes else None,
            outs=_outs(split, cache, output_gate=output_gate)[: len(shapes)],
        )
        seen = split.heads.times(cache.value_dim)
        self._output = w.merging_linear(output, shape=(hidden, heads * cache.value_dim), ins=seen)
        widths = sum(self._qkv.sizes) + seen.count
        self.row_elements = 4 * widths + self._output.row_elements
        self.matrix_elements = hidden * widths

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] of `step.rows` alone.

        The keys and values of all tokens are written first.
        """
        queries, *stored = self._qkv(x)
        if stored:
            self._store(stored[0], stored[-1], step)
        queries, gates = self._split(queries.unflatten(1, (self._heads, -1)))
        queries = self._turned(queries, self._q_norm, step)
        if self._temperature is not None:
            queries = (queries * self._temperature(step.positions)).to(x.dtype)
        seen = paged_attention(
            queries,
            step.pages,
            step.plan,
            scale=self._scale,
            softcap=self._softcap,
            sinks=self._sinks,
        ).flatten(1)
        seen = step.kept(seen)
        if gates is not None:
            seen = sigmoid_mul(step.kept(gates.flatten(1)), seen)
        return self._output(seen)

    def _split(self, queries: Tensor) -> tuple[Tensor, Tensor | None]:
        """[tokens, heads, key_dim] and the like for gates, where there are any."""
        if not self._output_gate:
            return queries, None
        queries, gates = queries.chunk(2, dim=2)
        return queries, gates

    def _store(self, keys: Tensor, values: Tensor, step: Step) -> None:
        keys, values = (part.unflatten(1, (self._kv_heads, -1)) for part in (keys, values))
        if self._v_norm is not None:
            values = self._v_norm(values)
        write_cache(self._turned(keys, self._k_norm, step), values, step.pages, step.plan)

    def _turned(self, x: Tensor, norm: RMSNorm | AcrossHeads | None, step: Step) -> Tensor:
        """x [tokens, heads, key_dim] -> like x."""
        x = x if norm is None else norm(x)
        x = x if step.rotation is None else step.rotation(x)
        return x if self._turned_norm is None else self._turned_norm(x)


def _outs(split: HeadSplit, cache: LayerCache, *, output_gate: bool) -> tuple[Split, Split, Split]:
    """How ranks divide the rows of queries, keys and values."""
    return (
        split.heads.times((1 + output_gate) * cache.key_dim),
        split.kv_heads.times(cache.key_dim),
        split.kv_heads.times(cache.value_dim),
    )


def read_sinks(w: TensorScope, heads: int) -> Tensor:
    """`attn_sinks` float32 [heads], with or without the suffix of weights."""
    return w.vector("attn_sinks", size=heads, bare=True)
