"""Multi-head latent attention: the cache holds one compressed vector per token for all heads."""

from dataclasses import dataclass

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.indexer import Indexer, shared_choice
from model_zoo.layers.step import Step
from model_zoo.layers.temperature import Temperature
from model_zoo.layers.tensor_parallel import divided_heads
from model_zoo.layers.text_sizes import MAX_HEAD_DIM
from runtime.distributed.ranks import Split
from runtime.kernels.activations import Activations
from runtime.kernels.attention import Scoring, paged_attention, write_cache
from runtime.kernels.experts import expert_products
from runtime.kernels.pointwise import joined
from runtime.kv.cache_kinds import CacheKind
from runtime.kv.cache_layout import LayerCache
from runtime.quant.weight import Weight
from runtime.worker.model import AttentionPlan

HEAD_KEYS = "attention.key_length_mla", "attention.value_length_mla"
MAX_RANK = 1 << 16


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of a latent attention.

    latent: size of the compressed vector from which keys and values of all heads are computed.
    plain, rotated: sizes of the parts of a query without and with rotary embedding, in this order;
    all heads share the rotated part of a key, which is not rotated in layers without an embedding.
    value: size of a head's output. query_rank: size of compressed queries; None: not compressed.
    """

    heads: int
    latent: int
    plain: int
    rotated: int
    value: int
    query_rank: int | None = None

    @property
    def query(self) -> int:
        return self.plain + self.rotated

    @classmethod
    def read(
        cls, w: TensorScope, metadata: Metadata, *, heads: int, keys: tuple[str, str] = HEAD_KEYS
    ) -> "LatentSizes":
        """Sizes of a layer. keys: those of the sizes of a query and of a head's output.

        Raises ModelFileError for missing or impossible sizes.
        """
        rotated = metadata.require_size("rope.dimension_count", at_most=MAX_HEAD_DIM)
        query, value = (metadata.require_size(key, at_most=MAX_HEAD_DIM) for key in keys)
        if query <= rotated:
            raise metadata.error(
                "rope.dimension_count",
                f"is {rotated}; it must be below {query}, the size of a query",
            )
        rank = None
        if metadata.has("attention.q_lora_rank") and not w.has("attn_q"):
            rank = metadata.require_size("attention.q_lora_rank", at_most=MAX_RANK)
        return cls(
            heads=heads,
            latent=metadata.require_size("attention.kv_lora_rank", at_most=MAX_HEAD_DIM),
            plain=query - rotated,
            rotated=rotated,
            value=value,
            query_rank=rank,
        )

    def cache(self, kind: CacheKind) -> LayerCache:
        """The cache of a layer: one key head with the latent vector and the rotated key, whose
        value is the latent vector."""
        return LayerCache(kind, 1, self.latent + self.rotated, self.latent, values_in_keys=True)


class LatentAttention:
    """Attention whose keys and values are products of a cached latent vector (DeepSeek-V2,
    section 2.1).

    The matrices from latent vectors to keys and values are applied to queries and outputs instead
    (section 2.1.2, "absorbed"), so that the heads' own keys and values are never computed. Files
    have the matrices as `attn_k_b` (heads, latent, plain) and `attn_v_b` (heads, value, latent) or,
    older ones, as `attn_kv_b` (heads * (plain + value), latent).

    Ranks divide the heads; each has the whole cache. `scale` multiplies the scores, `temperature`
    queries, by position. With an indexer, which needs compressed queries, rows attend to the tokens
    that it chooses; with `shares_choice`, to those of the last indexer before the layer.
    """

    def __init__(
        self,
        w: TensorScope,
        sizes: LatentSizes,
        *,
        hidden: int,
        eps: float,
        scale: float,
        temperature: Temperature | None = None,
        indexer: Indexer | None = None,
        shares_choice: bool = False,
    ) -> None:
        query = "attn_q" if sizes.query_rank is None else "attn_q_b"
        heads = divided_heads(w, sizes.heads, 1, query=query).heads
        self._sizes, self._scoring, self._deterministic = sizes, Scoring(scale), w.deterministic
        self._temperature = temperature
        self._indexer, self._shares_choice = indexer, shares_choice
        self._queries = _Queries(w, sizes, heads, hidden, eps)
        rows = sizes.latent + sizes.rotated
        self._compress = w.linear("attn_kv_a_mqa", shape=(rows, hidden))
        self._norm = w.rms_norm("attn_kv_a_norm", eps, size=sizes.latent)
        self._to_keys, self._to_values = _head_matrices(w, sizes, heads)
        outputs = heads.times(sizes.value)
        self._output = w.merging_linear(
            "attn_output", shape=(hidden, sizes.heads * sizes.value), ins=outputs
        )
        width = heads.count * (sizes.query + 3 * rows + 2 * sizes.latent + sizes.value)
        self.row_elements = 4 * (width + 2 * rows + (sizes.query_rank or 0))
        self.row_elements += self._output.row_elements
        self.matrix_elements = hidden * (outputs.count + heads.count * sizes.query + rows)
        if indexer is not None:
            self.row_elements += indexer.row_elements
            self.matrix_elements = max(self.matrix_elements, indexer.matrix_elements)
        self.rounding = self._compress.rounding

    def __call__(self, x: Activations, step: Step) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] if `step.rows` selects
        rows."""
        sizes, rotation = self._sizes, step.rotation
        latents, keys = self._compress(x).split((sizes.latent, sizes.rotated), dim=1)
        latents, keys = self._norm(latents).unsqueeze(1), keys.unsqueeze(1)
        keys = joined(latents, keys if rotation is None else rotation(keys))
        write_cache(keys, None, step.pages, step.plan)
        compressed = self._queries.compressed(x)
        plan, pages = self._chosen(x, compressed, step), step.pages
        if plan is None:
            plan = step.plan
        else:
            pages = pages.cells
        queries = self._queries(compressed)
        plain, rotated = queries.split((sizes.plain, sizes.rotated), dim=2)
        absorbed = expert_products(joined(plain), self._to_keys, None)  # one expert for each head
        queries = joined(absorbed, rotated if rotation is None else rotation(joined(rotated)))
        if self._temperature is not None:
            queries = self._temperature(queries, step.positions)
        attended = paged_attention(
            queries, pages, plan, self._scoring, deterministic=self._deterministic
        )
        attended = step.kept(attended.flatten(1)).unflatten(1, attended.shape[1:])
        return self._output(expert_products(attended, self._to_values, None).flatten(1))

    def _chosen(self, x: Activations, compressed: Activations, step: Step) -> AttentionPlan | None:
        """The plan of chosen tokens; None if rows attend to all that they see."""
        if self._indexer is not None:
            return self._indexer(x, compressed, step)
        return shared_choice(step) if self._shares_choice else None


class _Queries:
    """x [tokens, hidden], as `compressed` -> [tokens, this rank's heads, plain + rotated]."""

    def __init__(
        self, w: TensorScope, sizes: LatentSizes, heads: Split, hidden: int, eps: float
    ) -> None:
        self._heads, rows, rank = heads.count, sizes.heads * sizes.query, sizes.query_rank
        outs = heads.times(sizes.query)
        self._compress = self._norm = None
        if rank is None:
            self._expand = w.linear("attn_q", shape=(rows, hidden), outs=outs)
        else:
            self._compress = w.linear("attn_q_a", shape=(rank, hidden))
            self._norm = w.rms_norm("attn_q_a_norm", eps, size=rank)
            self._expand = w.linear("attn_q_b", shape=(rows, rank), outs=outs)

    def compressed(self, x: Activations) -> Activations:
        """[tokens, query_rank]; x itself if queries are not compressed."""
        if self._compress is None or self._norm is None:
            return x
        return self._norm(self._compress(x))

    def __call__(self, compressed: Activations) -> Tensor:
        return self._expand(compressed).unflatten(1, (self._heads, -1))


def _head_matrices(w: TensorScope, sizes: LatentSizes, heads: Split) -> tuple[Weight, Weight]:
    """(this rank's heads, latent, plain) and (this rank's heads, value, latent)."""
    if w.has("attn_k_b") or not w.has("attn_kv_b"):
        shapes = (sizes.heads, sizes.latent, sizes.plain), (sizes.heads, sizes.value, sizes.latent)
        keys = w.weight("attn_k_b", shape=shapes[0], each=heads, tiled=True)
        return keys, w.weight("attn_v_b", shape=shapes[1], each=heads, tiled=True)
    height = sizes.plain + sizes.value
    shape = sizes.heads * height, sizes.latent
    both = w.weight("attn_kv_b", shape=shape, outs=heads.times(height))
    both = both.unflatten(heads.count)
    return w.transposed(both.outputs(0, sizes.plain)), both.outputs(sizes.plain, height)
