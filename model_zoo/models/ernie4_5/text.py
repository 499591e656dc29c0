"""ERNIE 4.5, dense and with experts."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.leading_dense import SOFTMAX, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved, as in the checkpoints."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.INTERLEAVED, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """Files state neither how experts are scored nor that their weights are renormalised."""
    feed_forward = None
    if sizes.metadata.get("expert_count", int, 0):
        feed_forward = leading_dense_or_experts(w, sizes, index, scores=SOFTMAX, renormalised=True)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
