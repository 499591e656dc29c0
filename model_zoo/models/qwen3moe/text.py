"""Qwen 3 with experts."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.experts import Experts, ExpertSizes, stated_softmax
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """As Qwen 3, with experts instead of one feed-forward in every layer."""
    sizes = Sizes.read(metadata)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, base=base)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary) -> Layer:
    cache = sizes.cache(index, Full())
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
        q_norm=w.rms_norm("attn_q_norm", sizes.eps, size=sizes.key_dim),
        k_norm=w.rms_norm("attn_k_norm", sizes.eps, size=sizes.key_dim),
    )
    return Layer(read_block(w, sizes, attention, _experts(w, sizes)), cache, rotary)


def _experts(w: TensorScope, sizes: Sizes) -> Experts:
    metadata = sizes.metadata
    return Experts(
        w,
        hidden=sizes.hidden,
        sizes=ExpertSizes.read(metadata),
        routing=stated_softmax(metadata),
    )
