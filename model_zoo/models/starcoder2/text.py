"""StarCoder 2 and CodeShell: layer norms, biases everywhere, and feed-forwards without gate."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm, uniform_decoder
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu

CODESHELL = "codeshell"
BIASED = ("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """All layers have a window, if the file states one; llama.cpp's converter does not. Files of
    CodeShell may have one tensor for embedding and head, with the name of the head."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    by_head = metadata.architecture == CODESHELL
    options = replace(biased_output_norm(w, sizes), embeds_by_head=by_head)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.need_biases(*BIASED)
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=sizes.window(),
        feed_forward=FeedForward(
            w, hidden=sizes.hidden, size=sizes.feed_forward[index], curve=gelu
        ),
        block=BlockOptions(layer_norms=True),
    )
