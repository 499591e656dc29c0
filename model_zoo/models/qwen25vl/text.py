"""Qwen 2-VL and 2.5-VL: the text model."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes

# Values of all models, as in Qwen2_5_VLTextConfig of `transformers`.
SECTIONS, BASE = (16, 24, 24), 1_000_000.0


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Qwen 2 with rotation by time, row and column in consecutive sections."""
    sizes = TextSizes.read(metadata)
    return uniform_decoder(
        w, sizes, Pairs.NEOX, _layer, dim=sizes.key_dim, default_base=BASE, sections=SECTIONS
    )


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.need_biases("attn_qkv", "attn_q", "attn_k", "attn_v")
    return attention_layer(w, sizes, index, rotary)
