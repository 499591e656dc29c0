"""MiniCPM 1 to 4.1: Llama with multipliers of embeddings, residuals and logits; in MiniCPM 3 with
latent attention."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.experts import experts_or_dense
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.latent_attention import LatentAttention, LatentSizes
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE, read_rotary
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.kv.cache_kinds import Full

LATENT = "minicpm3"  # the architecture of MiniCPM 3
MAX_RANK = 1 << 16
# Of all published models. Files of MiniCPM 3, and the first ones of MiniCPM 1 and 2, state no
# multipliers.
EMBEDDING_SCALE, DEPTH_SCALE, LOGIT_WIDTH = 12.0, 1.4, 256
# Of the norms of compressed vectors in the authors' code, whatever that of the other norms is.
LATENT_EPS = 1e-6


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved in files of MiniCPM 1, 2 and 4, whose converters have permuted
    the rows of attn_q and attn_k.

    Converters write factors of LongRoPE without the original context, which equals the context in
    all published models.
    """
    sizes = TextSizes.read(metadata)
    latent = metadata.architecture == LATENT
    rotated = metadata.require_size("rope.dimension_count", at_most=MAX_HEAD_DIM) if latent else 0
    rotary = read_rotary(
        w,
        replace(sizes, key_dim=rotated) if latent else sizes,
        Pairs.NEOX if latent else Pairs.INTERLEAVED,
        default_base=DEFAULT_BASE,
        original_context=sizes.context_length,
    )
    make = _latent_layer if latent else _layer
    layers = [make(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    options = DecoderOptions(
        embedding_scale=metadata.get_positive("embedding_scale", EMBEDDING_SCALE),
        logit_scale=1 / metadata.get_positive("logit_scale", sizes.hidden / LOGIT_WIDTH),
    )
    return Decoder(w, sizes, layers, options)


def _block_options(sizes: TextSizes) -> BlockOptions:
    usual = DEPTH_SCALE / sizes.layers**0.5
    return BlockOptions(residual_scale=sizes.metadata.get_positive("residual_scale", usual))


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    feed_forward = experts_or_dense(w, sizes, index)
    block = _block_options(sizes)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward, block=block)


def _latent_layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    latent = _latent_sizes(w, sizes, index)
    attention = LatentAttention(
        w, latent, hidden=sizes.hidden, eps=LATENT_EPS, scale=latent.query**-0.5
    )
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    block = _block_options(sizes).read(w, sizes, attention, feed_forward)
    return TextLayer(block, latent.cache(Full()), rotary, rotated_from=latent.latent)


def _latent_sizes(w: TensorScope, sizes: TextSizes, index: int) -> LatentSizes:
    """Sizes of a layer; converters omit the size of values, which is hidden / heads."""
    metadata, rank = sizes.metadata, "attention.q_lora_rank"
    rotated = metadata.require_size("rope.dimension_count", at_most=MAX_HEAD_DIM)
    query = metadata.require_size("attention.key_length", at_most=MAX_HEAD_DIM)
    if query <= rotated:
        raise metadata.error(
            "rope.dimension_count", f"is {rotated}; it must be below {query}, the size of a query"
        )
    return LatentSizes(
        heads=sizes.heads[index],
        latent=metadata.require_size("attention.kv_lora_rank", at_most=MAX_HEAD_DIM),
        plain=query - rotated,
        rotated=rotated,
        value=sizes.value_dim,
        query_rank=None if w.has("attn_q") else metadata.require_size(rank, at_most=MAX_RANK),
    )
