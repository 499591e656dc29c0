"""GLM-4 0414: norms before and after attention and feed-forward; half of each head is rotated."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved; `rope.dimension_count` states how much of a head is rotated."""
    sizes = Sizes.read(metadata)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.INTERLEAVED, key_dim=sizes.key_dim, base=base)
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
    )
    feed_forward = GatedFeedForward(
        w, hidden=sizes.hidden, size=sizes.feed_forward[index], whole="ffn_up"
    )
    return Layer(read_block(w, sizes, attention, feed_forward, post_norms=True), cache, rotary)
