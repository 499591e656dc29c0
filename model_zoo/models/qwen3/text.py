"""Qwen 3, dense, and OpenELM, whose layers have different numbers of heads and widths."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes

# Value of all models, as in Qwen3Config of `transformers`.
DEFAULT_HEAD_DIM = 128


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Qwen 2 without biases, with a norm of each head of queries and keys."""
    sizes = TextSizes.read(metadata, head_dim=DEFAULT_HEAD_DIM)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    return attention_layer(w, sizes, index, rotary, attention=head_norms(w, sizes))
