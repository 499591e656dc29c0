"""OLMo 2: norms follow attention and feed-forward; queries and keys are normed across all heads."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import AcrossHeads
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    sizes = Sizes.read(metadata)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, base=base)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary) -> Layer:
    cache = sizes.cache(index, Full())
    heads = sizes.heads[index]
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=heads,
        cache=cache,
        scale=sizes.key_dim**-0.5,
        q_norm=_norm(w, "attn_q_norm", sizes, heads),
        k_norm=_norm(w, "attn_k_norm", sizes, cache.kv_heads),
    )
    feed_forward = GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    block = read_block(w, sizes, attention, feed_forward, pre_norms=False, post_norms=True)
    return Layer(block, cache, rotary)


def _norm(w: TensorScope, name: str, sizes: Sizes, heads: int) -> AcrossHeads:
    return AcrossHeads(w.rms_norm(name, sizes.eps, size=heads * sizes.key_dim))
