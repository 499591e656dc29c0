"""Command-R: attention and feed-forward in parallel after one norm without bias."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import ParallelBlock
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.spec import Full

# As in CohereConfig of `transformers`.
DEFAULT_EPS, DEFAULT_LOGIT_SCALE = 1e-5, 0.0625


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved in the authors' checkpoints. The head is the embedding."""
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = TextSizes.read(metadata, eps=eps)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.INTERLEAVED, key_dim=sizes.key_dim, base=base)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    options = DecoderOptions(
        logit_scale=metadata.get_positive("logit_scale", DEFAULT_LOGIT_SCALE),
        output_norm=w.layer_norm("output_norm", eps, size=sizes.hidden),
    )
    return Decoder(w, sizes, layers, options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    cache = sizes.cache(index, Full())
    block = ParallelBlock(
        w.layer_norm("attn_norm", sizes.eps, size=sizes.hidden),
        SelfAttention(w, sizes, index, cache),
        GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index]),
    )
    return TextLayer(block, cache, rotary)
