"""Qwen 3 with experts."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.routing import stated_softmax
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Qwen 3 with experts in every layer."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    experts = Experts.read(w, sizes, ExpertOptions(routing=stated_softmax(sizes.metadata)))
    return attention_layer(
        w, sizes, index, rotary, attention=head_norms(w, sizes), feed_forward=experts
    )
