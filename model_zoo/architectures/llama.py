"""Llama 2 and 3, Mistral 7B and their many derivatives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_zoo.gguf.metadata import MAX_LAYERS, Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.feed_forward import SwiGLU
from model_zoo.layers.rope import Rotary
from runtime.errors import UnsupportedModelError
from runtime.kernels.workspace import workspace_bytes
from runtime.kv.spec import Full, LayerCache
from runtime.model import AttentionPlan, Batch, KVCache, LayerPages

DEFAULT_ROPE_BASE = 10000.0
MAX_HEAD_DIM = 4096
# Kernels pad rows to multiples of this.
PADDING = 512


class Llama:
    """A decoder of the llama family; see runtime.model.DecoderModel.

    Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k. The
    key `attention.sliding_window` of Mistral 7B v0.1 is ignored, as its users expect.
    """

    def __init__(self, w: TensorScope, metadata: Metadata) -> None:
        sizes = _Sizes(metadata)
        self.context_length = sizes.context_length
        self._token_embd = w.embedding("token_embd", shape=(None, sizes.hidden))
        self._rope = _rotary(w, metadata, sizes.key_dim)
        self._blocks = [_Block(w.scope("blk", i), sizes, i) for i in range(sizes.layers)]
        self._output_norm = w.rms_norm("output_norm", sizes.eps, size=sizes.hidden)
        self.vocab_size = self._token_embd.rows
        shape = (self.vocab_size or None, sizes.hidden)
        self._output = w.linear("output", alt="token_embd", shape=shape)
        self._known_tokens = metadata.length("tokenizer.ggml.tokens") or self.vocab_size
        self._sizes = sizes
        self._device = w.device
        self._weight_bytes = w.loaded_bytes

    @property
    def cache_layers(self) -> Sequence[LayerCache]:
        return self._sizes.caches

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Logits float32 [outputs, vocab_size]; -inf for rows that no token of the file has."""
        x = self._token_embd(batch.tokens)
        rotation = self._rope(batch.positions)
        last = len(self._blocks) - 1
        for index, block in enumerate(self._blocks):
            pages = cache.layer(index)
            rows = batch.output_rows if index == last else None
            x = block(x, rotation, pages, batch.plans[pages.group], rows)
        logits = self._output(self._output_norm(x)).float()
        if self._known_tokens < self.vocab_size:
            logits[:, self._known_tokens :] = -torch.inf
        return logits

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        """All in float32, as kernels compute; the residual rows, then a layer's widest step."""
        sizes = self._sizes
        row = 4 * sizes.hidden
        floats = tokens * (row + sizes.widest) + outputs * (row + 3 * self.vocab_size)
        matrix = max(sizes.largest_matrix, sizes.hidden * self.vocab_size)
        return 4 * floats + workspace_bytes(
            self._device, largest_matrix=matrix, caches=sizes.caches
        )


class _Sizes:
    """The numbers of a llama file, checked.

    `widest`: elements that a row needs at once in a layer; `largest_matrix`: elements, without the
    vocabulary's.
    """

    def __init__(self, metadata: Metadata) -> None:
        _refuse_unserved(metadata)
        self.layers = metadata.require_size("block_count", at_most=MAX_LAYERS)
        self.hidden = metadata.require_size("embedding_length")
        self.context_length = metadata.require_size("context_length")
        self.eps = metadata.get_positive("attention.layer_norm_rms_epsilon")
        self.feed_forward = metadata.require_per_layer("feed_forward_length", self.layers)
        self.heads = metadata.require_per_layer("attention.head_count", self.layers)
        kv_heads = metadata.get_per_layer("attention.head_count_kv", self.layers, self.heads)
        default = self.hidden // self.heads[0]
        limit = {"at_most": MAX_HEAD_DIM}
        self.key_dim = metadata.get_size("attention.key_length", default, **limit)
        value_dim = metadata.get_size("attention.value_length", default, **limit)
        for heads, shared in zip(self.heads, kv_heads, strict=True):
            if heads % shared:
                raise metadata.error(
                    "attention.head_count_kv", f"is {shared}, which does not divide {heads} heads"
                )
        self.caches = tuple(LayerCache(Full(), n, self.key_dim, value_dim) for n in kv_heads)
        attended = max(self.heads) * (self.key_dim + value_dim)
        attended += max(cache.elements_per_token for cache in self.caches)
        gated = 2 * max(self.feed_forward)
        self.widest = max(4 * attended, 3 * gated) + PADDING
        self.largest_matrix = self.hidden * max(attended, gated)


class _Block:
    """One layer: attention and feed-forward, each on a normalised copy, each added."""

    def __init__(self, w: TensorScope, sizes: _Sizes, index: int) -> None:
        hidden = sizes.hidden
        self._attn_norm = w.rms_norm("attn_norm", sizes.eps, size=hidden)
        self._attention = SelfAttention(
            w,
            hidden=hidden,
            heads=sizes.heads[index],
            cache=sizes.caches[index],
            scale=sizes.key_dim**-0.5,
        )
        self._ffn_norm = w.rms_norm("ffn_norm", sizes.eps, size=hidden)
        self._feed_forward = SwiGLU(w, hidden=hidden, size=sizes.feed_forward[index])
        w.ignore("attn_rot_embd")  # rotary frequencies that old converters stored

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        pages: LayerPages,
        plan: AttentionPlan,
        rows: Tensor | None,
    ) -> Tensor:
        """x [tokens, hidden], overwritten -> the same, or [outputs, hidden] of `rows` alone."""
        attended = self._attention(self._attn_norm(x), rotation, pages, plan, rows)
        x = attended.add_(x if rows is None else x.index_select(0, rows))
        return self._feed_forward(self._ffn_norm(x)).add_(x)


def _rotary(w: TensorScope, metadata: Metadata, key_dim: int) -> Rotary:
    dim = metadata.get_size("rope.dimension_count", key_dim)
    if dim % 2 or dim > key_dim:
        raise metadata.error(
            "rope.dimension_count", f"is {dim}; it must be even and at most {key_dim}"
        )
    return Rotary(
        dim,
        metadata.get_positive("rope.freq_base", DEFAULT_ROPE_BASE),
        scale=_rope_scale(metadata),
        factors=w.vector("rope_freqs", size=dim // 2, optional=True),
        device=w.device,
    )


def _rope_scale(metadata: Metadata) -> float:
    """What positions are multiplied by: 1 / factor for linear scaling."""
    kind = metadata.get("rope.scaling.type", str, "linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key('rope.scaling.type')}` is {kind}, which is not "
            "supported for this architecture; none and linear are."
        )
    key = "rope.scaling.factor" if metadata.has("rope.scaling.factor") else "rope.scale_linear"
    return 1.0 / metadata.get_positive(key, 1.0)


def _refuse_unserved(metadata: Metadata) -> None:
    experts = metadata.get("expert_count", int, 0)
    if experts > 0:
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key('expert_count')}` is {experts}; llama models "
            "with experts (Mixtral) are not supported."
        )
