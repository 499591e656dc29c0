"""DeepSeek MoE 16B: Llama with experts and shared ones; leading layers are dense."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.leading_dense import SOFTMAX, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.INTERLEAVED, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    feed_forward = leading_dense_or_experts(w, sizes, index, scores=SOFTMAX)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
