"""Qwen 2-VL and 2.5-VL: the text model."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.rope_sections import in_sections
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full

# The values of all models, as in Qwen2_5_VLTextConfig of `transformers`.
SECTIONS, DEFAULT_BASE = (16, 24, 24), 1_000_000.0


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """As Qwen 2, but that heads turn by time, row and column, one after the other."""
    sizes = Sizes.read(metadata)
    base = metadata.get_positive("rope.freq_base", DEFAULT_BASE)
    plain = read_rotary(
        w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, dim=sizes.key_dim, base=base
    )
    rotary = in_sections(plain, metadata, default=SECTIONS, interleaved=False)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary) -> Layer:
    w.need_biases("attn_qkv", "attn_q", "attn_k", "attn_v")
    cache = sizes.cache(index, Full())
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
    )
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    return Layer(read_block(w, sizes, attention, feed_forward), cache, rotary)
