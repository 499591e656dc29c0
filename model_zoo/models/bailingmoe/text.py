"""Ling and Ring 1 and 1.5: attention of Llama, and experts with shared ones in every layer."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.leading_dense import SOFTMAX, stated_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """llama.cpp's converter permutes the rows of queries and keys, as those of Llama."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.INTERLEAVED, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    experts = stated_experts(w, sizes, scores=SOFTMAX)
    return attention_layer(w, sizes, index, rotary, feed_forward=experts)
