"""MiniMax M3: leading dense layers, then experts with a shared one; gates are those of gpt-oss."""

from dataclasses import replace
from functools import partial

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer, uniform_decoder
from model_zoo.layers.indexer import HeadIndexer, IndexerSizes, has_head_indexer
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.tensor_parallel import divided_heads
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.experts import clamped_swiglu
from runtime.kv.cache_kinds import Full

# As in MiniMaxM3VLTextConfig of `transformers`; files do not state them.
LIMIT, SLOPE = 7.0, 1.702
GATED = partial(clamped_swiglu, limit=LIMIT, slope=SLOPE)


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The norm weights in a file are those of the model plus one.

    Layers with an indexer choose 16 blocks of 128 tokens (`attention.indexer.top_k`, `block_size`)
    for each key/value head, once a row can see more. In layers without one, rows attend to all
    tokens.
    """
    sizes, options = TextSizes.read(metadata), DecoderOptions(own_head=True)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    attention, indexing = head_norms(w, sizes), None
    if has_head_indexer(w.scope("indexer")):
        rotated = 2 * len(rotary.frequencies)
        indexing = IndexerSizes.read(sizes.metadata, rotated=rotated, in_blocks=True)
        attention = replace(attention, indexer=_indexer(w, sizes, index, indexing))
    layer = attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=attention,
        feed_forward=leading_dense_or_experts(
            w, sizes, index, scores=SIGMOID, renormalised=True, gated=GATED
        ),
    )
    if indexing is None:
        return layer
    return replace(layer, beside=indexing.cache(Full()), beside_rotary=rotary)


def _indexer(w: TensorScope, sizes: TextSizes, index: int, indexing: IndexerSizes) -> HeadIndexer:
    heads = divided_heads(w, sizes.heads[index], sizes.kv_heads[index]).kv_heads
    if indexing.heads != sizes.kv_heads[index]:
        raise sizes.metadata.error(
            "attention.indexer.head_count",
            f"is {indexing.heads}; there are {sizes.kv_heads[index]} key/value heads",
        )
    return HeadIndexer(
        w.scope("indexer"), indexing, hidden=sizes.hidden, eps=sizes.eps, heads=heads
    )
