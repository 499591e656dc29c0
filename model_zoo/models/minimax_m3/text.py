"""MiniMax M3: leading dense layers, then experts with a shared one; gates are those of gpt-oss."""

from functools import partial

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer, uniform_decoder
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.experts import clamped_swiglu

# As in MiniMaxM3VLTextConfig of `transformers`; files do not state them.
LIMIT, SLOPE = 7.0, 1.702
GATED = partial(clamped_swiglu, limit=LIMIT, slope=SLOPE)


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The norm weights in a file are those of the model plus one.

    The authors' model has an indexer in most layers, which chooses 16 blocks of 128 tokens
    (`attention.indexer.top_k`, `block_size`) that a row attends to once it can see more. Here rows
    attend to all of them, and indexers are not loaded.
    """
    sizes, options = TextSizes.read(metadata), DecoderOptions(own_head=True)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.scope("indexer").ignore_all()
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=head_norms(w, sizes),
        feed_forward=leading_dense_or_experts(
            w, sizes, index, scores=SIGMOID, renormalised=True, gated=GATED
        ),
    )
