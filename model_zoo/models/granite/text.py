"""Granite 3, dense and with experts: Llama with multipliers of embeddings, residuals and logits."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.experts import experts_or_dense
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k.

    Multipliers are 1 by default, as in GraniteConfig of `transformers`.
    """
    sizes = TextSizes.read(metadata)
    rotary = read_rotary(
        w,
        metadata,
        pairs=Pairs.INTERLEAVED,
        key_dim=sizes.key_dim,
        base=metadata.get_positive("rope.freq_base"),
    )
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    options = DecoderOptions(
        embedding_scale=metadata.get_positive("embedding_scale", 1.0),
        logit_scale=1 / metadata.get_positive("logit_scale", 1.0),
    )
    return Decoder(w, sizes, layers, options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    metadata = sizes.metadata
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=AttentionOptions(scale=metadata.get_positive("attention.scale", 1.0)),
        feed_forward=experts_or_dense(w, sizes, index),
        block=BlockOptions(residual_scale=metadata.get_positive("residual_scale", 1.0)),
    )
