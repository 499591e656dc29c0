"""Qwen 2 and 2.5, and KORMo."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes

BIASED = ("attn_qkv", "attn_q", "attn_k", "attn_v")


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Queries, keys and values have biases, in KORMo none of them.

    Windows, an option of the first checkpoints, are not used.
    """
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    if any(w.shape(f"{name}.bias", whole=True) is not None for name in BIASED):
        w.need_biases(*BIASED)
    return attention_layer(w, sizes, index, rotary)
