"""EXAONE 3 and 3.5, and EXAONE Deep."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, uniform_decoder
from model_zoo.layers.rope import Pairs
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Llama whose rotary pairs are halves, as in the checkpoints."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, attention_layer)
