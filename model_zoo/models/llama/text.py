"""Llama 2 and 3, Mistral 7B, Nemo and Mixtral, and their many derivatives."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import RowWise, read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.experts import Experts, ExpertSizes
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE, read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full

# As in LlamaConfig of `transformers`; Ollama's converter omits the key if settings lack it.
DEFAULT_EPS = 1e-6
# As in MixtralConfig; the settings of the authors' original checkpoints lack it.
MIXTRAL_BASE = 1_000_000.0


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k.

    The key `attention.sliding_window` of Mistral 7B v0.1 is ignored, as its users expect.
    """
    sizes = Sizes.read(metadata, eps=DEFAULT_EPS)
    usual = MIXTRAL_BASE if _has_experts(sizes) else DEFAULT_BASE
    rotary = read_rotary(
        w,
        metadata,
        pairs=Pairs.INTERLEAVED,
        key_dim=sizes.key_dim,
        dim=_rotated(sizes),
        base=metadata.get_positive("rope.freq_base", usual),
    )
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _rotated(sizes: Sizes) -> int | None:
    """Ollama's converter writes hidden / heads, more than the head size of Mistral Nemo."""
    stated = sizes.metadata.get("rope.dimension_count", int, sizes.key_dim)
    slip = stated == sizes.hidden // sizes.heads[0] > sizes.key_dim
    return sizes.key_dim if slip else None


def _has_experts(sizes: Sizes) -> bool:
    return sizes.metadata.get("expert_count", int, 0) > 0


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary) -> Layer:
    w.ignore("attn_rot_embd")  # rotary frequencies that old converters stored
    cache = sizes.cache(index, Full())
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
    )
    return Layer(read_block(w, sizes, attention, _feed_forward(w, sizes, index)), cache, rotary)


def _feed_forward(w: TensorScope, sizes: Sizes, index: int) -> RowWise:
    """Mixtral has experts in every layer."""
    if _has_experts(sizes):
        counts = ExpertSizes.read(sizes.metadata, width=sizes.feed_forward[index])
        return Experts(w, hidden=sizes.hidden, sizes=counts)
    return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
