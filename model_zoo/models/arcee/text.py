"""AFM of Arcee: Llama with feed-forwards that have no gate and whose activation is squared ReLU."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import relu_squared


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.INTERLEAVED, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=relu_squared)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
