"""Self-attention with grouped queries over the paged cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block_indexer import BlockIndexer
from model_zoo.layers.indexer import HeadIndexer
from model_zoo.layers.norm import AcrossHeads, LayerNorm, RMSNorm
from model_zoo.layers.step import Step
from model_zoo.layers.temperature import Temperature
from model_zoo.layers.tensor_parallel import divided_heads
from model_zoo.layers.text_sizes import TextSizes
from runtime.distributed.ranks import HeadSplit, Split
from runtime.kernels.activations import Activations, unrounded
from runtime.kernels.attention import Distances, Scoring, attended_rows
from runtime.kernels.attention_inputs import HeadNorms, prepare_attention
from runtime.kernels.clip import clip_
from runtime.kernels.experts import weighted_sum
from runtime.kernels.pointwise import Gate, contiguous, curve_alone, scale_, sigmoid_mul
from runtime.kv.cache_layout import LayerCache
from runtime.worker.model import AttentionPlan, LayerPages

# Norms of queries and keys before the rotation.
HeadsNorm = RMSNorm | AcrossHeads | LayerNorm


class OutputGate(Enum):
    """The place of gates: in `attn_q`, after the rows of each head's query, or in `attn_gate`,
    which has a row for each element of the heads' outputs or one for each head."""

    WITH_QUERIES = "with_queries"
    APART = "apart"
    OF_HEADS = "of_heads"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """The properties of attention that differ between families.

    scale: factor of the scores; None for 1 / sqrt(key_dim).
    clip: bound of the elements of queries, keys and values before everything else.
    q_norm, k_norm: applied before the rotation. rotated_q_norm, rotated_k_norm: applied after it;
    the latter has no weight, so that cached keys can be rotated to other positions.
    v_norm: applied to values.
    temperature: multiplies queries, by position.
    softcap, sinks: see `Scoring`; `sinks` has one entry for each head of all ranks.
    slopes: as of `Distances`, float32, one for each head of all ranks.
    output_norm: of the results of all heads of a row, before the output projection.
    output: name of the output projection. output_scale: factor of its results.
    stores: False if the layer reads the keys and values of another layer.
    keys_as_values: values are the unnormed keys if the file has no `attn_v`.
    output_gate: where the file has gates, whose curves multiply the outputs of heads.
    gate: the curve of these gates.
    indexer: chooses the tokens that rows attend to, or those of each key/value head.
    """

    scale: float | None = None
    clip: float | None = None
    q_norm: HeadsNorm | None = None
    k_norm: HeadsNorm | None = None
    v_norm: RMSNorm | None = None
    rotated_q_norm: RMSNorm | None = None
    rotated_k_norm: RMSNorm | None = None
    temperature: Temperature | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    output_norm: RMSNorm | None = None
    output: str = "attn_output"
    output_scale: float | None = None
    stores: bool = True
    keys_as_values: bool = False
    output_gate: OutputGate | None = None
    gate: Gate = sigmoid_mul
    indexer: HeadIndexer | BlockIndexer | None = None


class SelfAttention:
    """Softmax attention of a layer's query heads over the keys and values in `cache`, followed by a
    projection.

    Ranks divide the heads; `cache` declares the heads of all ranks.
    """

    def __init__(
        self,
        w: TensorScope,
        sizes: TextSizes,
        index: int,
        cache: LayerCache,
        options: AttentionOptions | None = None,
    ) -> None:
        options, hidden, heads = options or AttentionOptions(), sizes.hidden, sizes.heads[index]
        assert options.rotated_k_norm is None or options.rotated_k_norm.weight is None
        split = divided_heads(w, heads, cache.kv_heads)
        self._heads, self._kv_heads = split.heads.count, split.kv_heads.count
        self._options = options
        self._scale = cache.key_dim**-0.5 if options.scale is None else options.scale
        self._deterministic = w.deterministic
        own = slice(split.heads.begin, split.heads.end)
        self._sinks = None if options.sinks is None else options.sinks[own]
        self._slopes = None if options.slopes is None else options.slopes[own]
        parts = 1 + (options.output_gate is OutputGate.WITH_QUERIES)
        shapes = {"attn_q": (parts * heads * cache.key_dim, hidden)}
        if options.stores:
            shapes["attn_k"] = (cache.kv_heads * cache.key_dim, hidden)
        lacking = options.keys_as_values and not w.has("attn_v") and not w.has("attn_qkv")
        if options.stores and not lacking:
            shapes["attn_v"] = (cache.kv_heads * cache.value_dim, hidden)
        outputs = split.heads.times(cache.value_dim)
        outs = _outs(split, cache, parts)[: len(shapes)]
        whole = "attn_qkv" if "attn_v" in shapes else None
        if options.output_gate in (OutputGate.APART, OutputGate.OF_HEADS):
            each = cache.value_dim if options.output_gate is OutputGate.APART else 1
            shapes["attn_gate"], whole = (heads * each, hidden), None
            outs = *outs, split.heads.times(each)
        self._qkv = w.fused_linear(shapes, whole=whole, outs=outs)
        shape = hidden, heads * cache.value_dim
        self._output = w.merging_linear(options.output, shape=shape, ins=outputs)
        widths = self._qkv.width + outputs.count
        self.row_elements = 4 * widths + self._output.row_elements
        self.matrix_elements = hidden * widths
        self.rounding = self._qkv.rounding
        if (indexer := options.indexer) is not None:
            assert options.sinks is None and options.slopes is None, "rows are of one head each"
            self.row_elements += indexer.row_elements
            self.matrix_elements = max(self.matrix_elements, indexer.matrix_elements)

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or only [outputs, hidden] of `step.rows`.

        The keys and values of all tokens are written to the cache first.
        """
        options, slopes = self._options, self._slopes
        queries, stored, gates = self._projected(x)
        queries = self._prepared(queries, stored, step)
        if options.temperature is not None:
            queries = options.temperature(queries, step.positions)
        norm = options.output_norm
        whole = gates is None and norm is None and step.rows is None
        distances = None if slopes is None else Distances(slopes, step.positions)
        chosen = None if options.indexer is None else options.indexer(x, step)
        queries, pages = _rows_of_choices(queries, step.pages, chosen)
        attended = attended_rows(
            queries,
            pages,
            step.plan if chosen is None else chosen,
            Scoring(self._scale, options.softcap, self._sinks, distances),
            deterministic=self._deterministic,
            rounding=self._output.rounding if whole and chosen is None else None,
        )
        if chosen is not None:
            attended = unrounded(attended).view(len(step.positions), -1)
        if not whole:
            attended = step.kept(unrounded(attended))
        if gates is not None:
            gates = step.kept(contiguous(gates).flatten(1))
            attended = _gated(self._options.gate, gates, unrounded(attended))
        if norm is not None:
            attended = norm(unrounded(attended))
        result = self._output(attended)
        return result if options.output_scale is None else scale_(result, options.output_scale)

    def _projected(self, x: Activations) -> tuple[Tensor, Sequence[Tensor], Tensor | None]:
        """Queries [tokens, heads, key_dim]; keys and values, if the layer stores them; gates
        [tokens, heads, value_dim], [tokens, heads * value_dim] or [tokens, heads], if there are
        any."""
        queries, *others = self._qkv(x)
        if (clip := self._options.clip) is not None:
            queries, *others = (clip_(part, clip) for part in (queries, *others))
        queries = queries.unflatten(1, (self._heads, -1))
        match self._options.output_gate:
            case OutputGate.WITH_QUERIES:
                queries, gates = queries.chunk(2, dim=2)
                return queries, others, gates
            case OutputGate.APART | OutputGate.OF_HEADS:
                return queries, others[:-1], others[-1]
        return queries, others, None

    def _prepared(self, queries: Tensor, stored: Sequence[Tensor], step: Step) -> Tensor:
        """Normed and rotated queries. Also writes `stored`, keys and values, to the cache."""
        options, pair, k_norm = self._options, None, None
        if stored:
            keys, values = (
                part.unflatten(1, (self._kv_heads, -1)) for part in (stored[0], stored[-1])
            )
            keys, k_norm = _per_head(keys, options.k_norm)
            pair = keys, values
        queries, q_norm = _per_head(queries, options.q_norm)
        norms = HeadNorms(
            q_norm, k_norm, options.v_norm, options.rotated_q_norm, options.rotated_k_norm
        )
        return prepare_attention(queries, pair, norms, step.rotation, step.pages, step.plan)


def _rows_of_choices(
    queries: Tensor, pages: LayerPages, chosen: AttentionPlan | None
) -> tuple[Tensor, LayerPages]:
    """The rows and pages of attention by the plan of an indexer: of a `HeadIndexer`, a row for the
    queries of each key/value head, [tokens * kv_heads, heads / kv_heads, key_dim]."""
    if chosen is None:
        return queries, pages
    return queries.view(len(chosen.row_slot), -1, queries.shape[2]), pages.cells


def _gated(gate: Gate, gates: Tensor, attended: Tensor) -> Tensor:
    """attended [tokens, n] times the curve of gates [tokens, n] or [tokens, heads]."""
    if gates.shape == attended.shape:
        return gate(gates, attended)
    pairs, size = gates.numel(), attended.shape[1] // gates.shape[1]
    curved = curve_alone(gate, gates)
    each = weighted_sum(attended.view(pairs, 1, size), curved.view(pairs, 1))
    return each.view(attended.shape)


def falling_scores(
    sizes: TextSizes, index: int, device: torch.device, *, most: float = 8.0
) -> AttentionOptions:
    """Scores that fall with distance in layer `index`; most: as of `alibi_slopes`."""
    heads = sizes.heads[index]
    if heads > sizes.hidden:  # before as many numbers are computed
        raise sizes.metadata.error(
            "attention.head_count", f"is {heads:,}; a state has {sizes.hidden:,} elements"
        )
    return AttentionOptions(slopes=alibi_slopes(heads, most).to(device))


def alibi_slopes(heads: int, most: float = 8.0) -> Tensor:
    """Slopes of `Distances`, float32 [heads]; Press et al., "Train Short, Test Long", section 3.

    For a number of heads that is no power of two, those of the next lower one are followed by every
    second of those of twice as many heads. most: the last head's slope is 2 to the power -most.
    """
    lower = 1 << (heads.bit_length() - 1)
    own = [2 ** (-most * (head + 1) / lower) for head in range(lower)]
    between = [2 ** (-most / 2 * (2 * head + 1) / lower) for head in range(heads - lower)]
    return torch.tensor(own + between)


def _per_head(x: Tensor, norm: HeadsNorm | None) -> tuple[Tensor, RMSNorm | None]:
    """x with the RMS norm that all heads share, which is still to be applied; or x after another
    norm."""
    if isinstance(norm, RMSNorm) and (norm.weight is None or norm.weight.dim() == 1):
        return x, norm
    return (x if norm is None else norm(x)), None


def head_norms(w: TensorScope, sizes: TextSizes) -> AttentionOptions:
    """RMS norms of the queries and keys of each head, by their usual names."""
    q_norm, k_norm = (
        w.rms_norm(f"attn_{name}_norm", sizes.eps, size=sizes.key_dim) for name in ("q", "k")
    )
    return AttentionOptions(q_norm=q_norm, k_norm=k_norm)


def norms_across_heads(w: TensorScope, sizes: TextSizes, index: int) -> AttentionOptions:
    """One RMS norm of the queries of all heads and one of the keys, by the same names."""
    q_norm, k_norm = (
        AcrossHeads(w.rms_norm(f"attn_{name}_norm", sizes.eps, size=heads * sizes.key_dim))
        for name, heads in (("q", sizes.heads[index]), ("k", sizes.kv_heads[index]))
    )
    return AttentionOptions(q_norm=q_norm, k_norm=k_norm)


def head_layer_norms(w: TensorScope, sizes: TextSizes, index: int) -> AttentionOptions:
    """Layer norms without biases by the same names, with weights for each head; none if the file
    has none."""
    if not (w.has("attn_q_norm") or w.has("attn_k_norm")):
        return AttentionOptions()
    q_norm, k_norm = (
        LayerNorm(weight, torch.zeros_like(weight), sizes.eps)
        for weight in _weights_of_heads(w, sizes, index)
    )
    return AttentionOptions(q_norm=q_norm, k_norm=k_norm)


def norms_of_each_head(
    w: TensorScope, sizes: TextSizes, index: int, *, eps: float
) -> AttentionOptions:
    """RMS norms by the same names, with weights for each head."""
    q_norm, k_norm = (RMSNorm(weight, eps) for weight in _weights_of_heads(w, sizes, index))
    return AttentionOptions(q_norm=q_norm, k_norm=k_norm)


def _weights_of_heads(w: TensorScope, sizes: TextSizes, index: int) -> tuple[Tensor, Tensor]:
    """The norms' weights for the queries and keys of this rank's heads, [heads, key_dim] each."""
    heads, kv_heads = sizes.heads[index], sizes.kv_heads[index]
    split = divided_heads(w, heads, kv_heads)
    queries = w.table("attn_q_norm.weight", shape=(heads, sizes.key_dim))
    keys = w.table("attn_k_norm.weight", shape=(kv_heads, sizes.key_dim))
    return (
        queries[split.heads.begin : split.heads.end],
        keys[split.kv_heads.begin : split.kv_heads.end],
    )


def _outs(split: HeadSplit, cache: LayerCache, parts: int) -> tuple[Split, Split, Split]:
    """How ranks divide the rows of `attn_q`, which has `parts` times those of queries, of `attn_k`
    and of `attn_v`."""
    return (
        split.heads.times(parts * cache.key_dim),
        split.kv_heads.times(cache.key_dim),
        split.kv_heads.times(cache.value_dim),
    )


def read_sinks(w: TensorScope, heads: int) -> Tensor:
    """`attn_sinks` float32 [heads], with or without the suffix `.weight`."""
    return w.vector("attn_sinks", size=heads, bare=True)
