"""Qwen 1 to 2.5, KORMo, and openPangu-Embedded."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes

QWEN_1 = "qwen"
BIASED = ("attn_qkv", "attn_q", "attn_k", "attn_v")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Queries, keys and values have biases, in KORMo none of them.

    Windows, an option of the first checkpoints, are not used. Qwen 1 is computed alike for texts of
    any length; its authors scale queries and rotation of those beyond the length of training.
    """
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    if any(w.shape(f"{name}.bias", whole=True) is not None for name in BIASED):
        w.need_biases(*BIASED)
    size = sizes.feed_forward[index]
    if sizes.metadata.architecture == QWEN_1:
        size //= 2  # its files state the sum of gates and ups
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=size)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
