"""ERNIE 4.5, dense and with experts."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.leading_dense import SOFTMAX, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved, as in the checkpoints."""
    sizes = TextSizes.read(metadata)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.INTERLEAVED, key_dim=sizes.key_dim, base=base)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """Files state neither how experts are scored nor that their weights are renormalised."""
    feed_forward = None
    if sizes.metadata.get("expert_count", int, 0):
        feed_forward = leading_dense_or_experts(w, sizes, index, scores=SOFTMAX, renormalised=True)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
