"""Qwen 3-VL: the text model, dense or with experts."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import RowWise, read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.experts import Experts, ExpertSizes, stated_softmax
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.rope_sections import in_sections
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full

# The values of all models, as in Qwen3VLTextConfig of `transformers`.
SECTIONS, EPS, DEFAULT_HEAD_DIM = (24, 20, 20), 1e-6, 128


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """As Qwen 3, but that heads turn by time, row and column in turn.

    The tower's further features are added to the first layers' rows, as many as it brings.
    """
    sizes = Sizes.read(metadata, eps=EPS, head_dim=DEFAULT_HEAD_DIM)
    base = metadata.get_positive("rope.freq_base")
    plain = read_rotary(
        w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, dim=sizes.key_dim, base=base
    )
    rotary = in_sections(plain, metadata, default=SECTIONS, interleaved=True)
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
    return Layer(read_block(w, sizes, attention, _feed_forward(w, sizes, index)), cache, rotary)


def _feed_forward(w: TensorScope, sizes: Sizes, index: int) -> RowWise:
    metadata = sizes.metadata
    if not metadata.get("expert_count", int, 0):
        return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    return Experts(
        w,
        hidden=sizes.hidden,
        sizes=ExpertSizes.read(metadata),
        routing=stated_softmax(metadata),
    )
