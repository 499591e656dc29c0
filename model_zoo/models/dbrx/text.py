"""DBRX: experts in every layer, layer norms without biases, clipped queries, keys and values."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer, uniform_decoder
from model_zoo.layers.experts import Experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes

_BLOCK = BlockOptions(layer_norms=True, norm_biases=False, ffn_norm="attn_output_norm")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The weights of a row's experts are divided by their sum."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    norm = w.layer_norm("output_norm", sizes.eps, size=sizes.hidden)
    options = DecoderOptions(output_norm=norm, own_head=True)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    clip = sizes.metadata.get_positive("attention.clamp_kqv")
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=AttentionOptions(clip=clip),
        feed_forward=Experts.read(w, sizes),
        block=_BLOCK,
    )
