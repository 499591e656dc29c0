"""Llama 3.2 Vision: the text model, with cross-attention to images."""

from dataclasses import replace

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import derived
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.step import Step
from model_zoo.layers.tensor_parallel import divided_heads
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.attention import Scoring, paged_attention, write_cache
from runtime.kv.cache_kinds import Cross
from runtime.kv.cache_layout import LayerCache

# Images per sequence; each takes memory, and the model was trained with one.
MOST_IMAGES = 4
PATCH = 14
# Values of both models, as in MllamaTextConfig of `transformers`.
EPS, DEFAULT_BASE = 1e-5, 500_000.0


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Llama with cross-attention layers; the head has fewer rows than the embedding."""
    sizes = TextSizes.read(metadata, eps=EPS)
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED, default_base=DEFAULT_BASE)
    cross = set(metadata.require_array("attention.cross_attention_layers", int))
    rows = _rows_of_an_image(metadata)
    layers = [
        _cross_layer(w.scope("blk", index), sizes, index, rows)
        if index in cross
        else attention_layer(w.scope("blk", index), sizes, index, rotary)
        for index in range(sizes.layers)
    ]
    head_rows = metadata.require_size("vocab_size")
    # Keys and values of one image at a time, and its features in the type of the decoder.
    largest = max(cache.page_elements(1) for layer in layers for cache in layer.stored)
    stored = 4 * largest + sizes.hidden
    return Decoder(
        w, sizes, layers, DecoderOptions(head_rows=head_rows, image_elements=rows * stored)
    )


def _rows_of_an_image(metadata: Metadata) -> int:
    """The patches of all tiles, plus a class row for each tile; 0 if the file has no vision
    model."""
    if not metadata.has("vision.image_size"):
        return 0
    side = metadata.require_size("vision.image_size") // metadata.get_size(
        "vision.patch_size", PATCH
    )
    return metadata.get_size("vision.max_num_tiles", 4) * (side * side + 1)


def _cross_layer(w: TensorScope, sizes: TextSizes, index: int, rows: int) -> TextLayer:
    cache = sizes.cache(index, Cross(MOST_IMAGES, rows, lead_in=True))
    return TextLayer(CrossBlock(w, sizes, index, cache), cache)


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> GatedFeedForward:
    return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])


class CrossBlock:
    """Attention to image rows and a feed-forward, both gated and added.

    It does nothing if no row attends to an image. As in `transformers`, text before the first image
    attends to all images and skips the feed-forward.
    """

    def __init__(self, w: TensorScope, sizes: TextSizes, index: int, cache: LayerCache) -> None:
        hidden, heads = sizes.hidden, sizes.heads[index]
        keys, values = cache.kv_heads * cache.key_dim, cache.kv_heads * cache.value_dim
        split = divided_heads(w, heads, cache.kv_heads, query="cross_attn_q_proj")
        queries = split.heads.times(cache.key_dim)
        attended = split.heads.times(cache.value_dim)
        self._heads, self._kv_heads = split.heads.count, split.kv_heads.count
        self._scoring, self._deterministic = Scoring(cache.key_dim**-0.5), w.deterministic
        self._attn_norm = w.rms_norm("attn_norm", sizes.eps, size=hidden)
        shape = heads * cache.key_dim, hidden
        self._query = w.linear("cross_attn_q_proj", shape=shape, outs=queries)
        key_rows = split.kv_heads.times(cache.key_dim)
        value_rows = split.kv_heads.times(cache.value_dim)
        self._key = w.linear("cross_attn_k_proj", shape=(keys, hidden), outs=key_rows)
        self._value = w.linear("cross_attn_v_proj", shape=(values, hidden), outs=value_rows)
        shape = hidden, heads * cache.value_dim
        self._output = w.merging_linear("cross_attn_o_proj", shape=shape, ins=attended)
        self._q_norm = _head_norm(w, "cross_attn_q_norm", sizes)
        self._k_norm = _head_norm(w, "cross_attn_k_norm", sizes)
        self._ffn_norm = w.rms_norm("ffn_norm", sizes.eps, size=hidden)
        self._feed_forward = _feed_forward(w, sizes, index)
        self._attn_gate = _gate(w, "cross_attn_attn_gate")
        self._mlp_gate = _gate(w, "cross_attn_mlp_gate")
        attention = 4 * (queries.count + attended.count) + self._output.row_elements
        self.row_elements = max(attention, self._feed_forward.row_elements)
        largest = hidden * max(queries.count, keys, values, attended.count)
        self.matrix_elements = max(largest, self._feed_forward.matrix_elements)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden] -> the same shape, or [outputs, hidden] if `step.rows` selects
        rows."""
        self._store(step)
        if step.plan.sees_nothing:
            return step.kept(x)
        queries = self._q_norm(self._query(self._attn_norm(x)).unflatten(1, (self._heads, -1)))
        seen = paged_attention(
            queries, step.pages, step.plan, self._scoring, deterministic=self._deterministic
        )
        attended = self._output(step.kept(seen.flatten(1))).mul_(self._attn_gate.to(x.dtype))
        x = attended.add_(step.kept(x))
        assert step.plan.after_image is not None
        fed = step.kept(step.plan.after_image).unsqueeze(1) * self._mlp_gate
        return self._feed_forward(self._ffn_norm(x)).mul_(fed.to(x.dtype)).add_(x)

    def _store(self, step: Step) -> None:
        """Writes the keys and values of images whose placeholder is in this step."""
        kv_heads, plan = self._kv_heads, step.plan
        for features, write in zip(step.batch.cross_features, plan.image_writes, strict=True):
            keys = self._k_norm(self._key(features).unflatten(1, (kv_heads, -1)))
            values = self._value(features).unflatten(1, (kv_heads, -1))
            cells = replace(plan, write_cell=plan.write_cell[write.begin : write.end])
            write_cache(keys, values, step.pages, cells)


def _head_norm(w: TensorScope, name: str, sizes: TextSizes) -> RMSNorm:
    """The norm of queries or keys. In files, the rows of q and k are in interleaved pairs, but the
    weights of their norms are not."""
    if sizes.key_dim % 2:
        raise sizes.metadata.error("attention.key_length", f"is {sizes.key_dim:,}; it must be even")
    norm = w.rms_norm(name, sizes.eps, size=sizes.key_dim)
    assert norm.weight is not None
    return RMSNorm(norm.weight.view(2, -1).t().flatten(), norm.eps)


def _gate(w: TensorScope, name: str) -> Tensor:
    """float32 [1], between -1 and 1."""
    return derived(torch.tanh, w.vector(name, size=1, bare=True))
