"""Self-attention with grouped queries over the paged cache."""

from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from runtime.kernels.attention import paged_attention, write_cache
from runtime.kernels.pointwise import rope_interleaved
from runtime.kv.spec import LayerCache
from runtime.model import AttentionPlan, LayerPages


class SelfAttention:
    """Interleaved rotary embedding, causal by the plan, scale 1 / sqrt(key_dim)."""

    def __init__(
        self, w: TensorScope, *, hidden: int, heads: int, cache: LayerCache, scale: float
    ) -> None:
        self._heads = heads
        self._kv_heads = cache.kv_heads
        self._scale = scale
        self._qkv = w.fused_linear(
            {
                "attn_q": (heads * cache.key_dim, hidden),
                "attn_k": (cache.kv_heads * cache.key_dim, hidden),
                "attn_v": (cache.kv_heads * cache.value_dim, hidden),
            },
            whole="attn_qkv",
        )
        self._output = w.linear("attn_output", shape=(hidden, heads * cache.value_dim))

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        pages: LayerPages,
        plan: AttentionPlan,
        rows: Tensor | None,
    ) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [outputs, hidden] of `rows` alone.

        The keys and values of all tokens are written first.
        """
        queries, keys, values = self._qkv(x)
        queries = rope_interleaved(queries.unflatten(1, (self._heads, -1)), *rotation)
        keys = rope_interleaved(keys.unflatten(1, (self._kv_heads, -1)), *rotation)
        write_cache(keys, values.unflatten(1, (self._kv_heads, -1)), pages, plan)
        seen = paged_attention(queries, pages, plan, scale=self._scale).flatten(1)
        return self._output(seen if rows is None else seen.index_select(0, rows))
