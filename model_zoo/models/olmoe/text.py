"""OLMoE: experts in every layer; queries and keys are normed across all heads."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import norms_across_heads
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.routing import SOFTMAX_OF_ALL
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The weights of a row's experts are probabilities over all experts, as in llama.cpp."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=norms_across_heads(w, sizes, index),
        feed_forward=Experts.read(w, sizes, ExpertOptions(routing=SOFTMAX_OF_ALL)),
    )
