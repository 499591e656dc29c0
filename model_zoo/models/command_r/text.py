"""Command-R: attention and feed-forward side by side behind one norm without bias."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import ParallelBlock
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full

# As in CohereConfig of `transformers`.
DEFAULT_EPS, DEFAULT_LOGIT_SCALE = 1e-5, 0.0625


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved in the authors' checkpoints. The head is the embedding."""
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = Sizes.read(metadata, eps=eps)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.INTERLEAVED, key_dim=sizes.key_dim, base=base)
    return Decoder(
        w,
        sizes,
        [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)],
        logit_divisor=1 / metadata.get_positive("logit_scale", DEFAULT_LOGIT_SCALE),
        output_norm=w.layer_norm("output_norm", eps, size=sizes.hidden),
    )


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary) -> Layer:
    cache = sizes.cache(index, Full())
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
    )
    block = ParallelBlock(
        w.layer_norm("attn_norm", sizes.eps, size=sizes.hidden),
        attention,
        GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index]),
    )
    return Layer(block, cache, rotary)
