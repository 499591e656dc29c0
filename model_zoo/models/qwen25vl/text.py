"""Qwen 2-VL and 2.5-VL: the text model."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.rope_sections import in_sections
from model_zoo.layers.text_sizes import TextSizes

# Values of all models, as in Qwen2_5_VLTextConfig of `transformers`.
SECTIONS, DEFAULT_BASE = (16, 24, 24), 1_000_000.0


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Qwen 2 with rotation by time, row and column in consecutive sections."""
    sizes = TextSizes.read(metadata)
    plain = read_rotary(w, sizes, Pairs.NEOX, dim=sizes.key_dim, default_base=DEFAULT_BASE)
    rotary = in_sections(plain, metadata, default=SECTIONS, interleaved=False)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.need_biases("attn_qkv", "attn_q", "attn_k", "attn_v")
    return attention_layer(w, sizes, index, rotary)
