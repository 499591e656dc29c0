"""ModernBERT: an encoder with norms before its layers, rotary positions, and windows in most
layers."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.attention_layer import Attended, alternating_layers
from model_zoo.layers.block import Block
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.stack import TextLayer
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder, embedding_norm
from model_zoo.layers.text_sizes import TextSizes
from runtime.errors import UnsupportedModelError
from runtime.kernels.pointwise import Gate, gelu_erf_mul, silu_mul
from runtime.kv.cache_kinds import CacheKind, Full, Symmetric

# As in ModernBertConfig of `transformers`; the first of every three layers has no window.
DEFAULT_EPS = 1e-5
FULL_EVERY = 3
GLOBAL_BASE, LOCAL_BASE = 160_000.0, 10_000.0
WINDOW, CURVE = "attention.sliding_window", "hidden_activation"
GATES = {"gelu": gelu_erf_mul, "silu": silu_mul}


def build_decoder(w: TensorScope, metadata: Metadata) -> TextEncoder:
    """Layers with a window have another rotary base than the others. The first layer has no norm
    before its attention."""
    eps = metadata.get_positive("attention.layer_norm_epsilon", DEFAULT_EPS)
    sizes = TextSizes.read(metadata, eps=eps)
    w.ignore("cls", "cls.norm")  # parts of the head for masked tokens, which converters keep
    near: Attended = Full(), _rotary(w, sizes, "", GLOBAL_BASE)
    far = near
    if metadata.get(WINDOW, int, 0):
        window = Symmetric(metadata.require_size(WINDOW) // 2)
        near = window, _rotary(w, sizes, "_swa", LOCAL_BASE)
    slides = sizes.sliding_layers(FULL_EVERY, full=0)
    layers = alternating_layers(w, sizes, slides, _layer, near=near, far=far)
    options = EncoderOptions(
        embedding_norm=embedding_norm(w, sizes, biased=False),
        output_norm=w.layer_norm("output_norm", eps, size=sizes.hidden),
    )
    return TextEncoder(w, sizes, layers, options)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    cache, hidden = sizes.cache(index, kind), sizes.hidden
    first = index == 0 and not w.has("attn_norm")
    block = Block(
        None if first else w.layer_norm("attn_norm", sizes.eps, size=hidden),
        SelfAttention(w, sizes, index, cache),
        w.layer_norm("ffn_norm", sizes.eps, size=hidden),
        GatedFeedForward(
            w,
            hidden=hidden,
            size=sizes.feed_forward[index],
            gated=_gate(sizes.metadata),
            whole="ffn_up",
        ),
    )
    return TextLayer(block, cache, rotary)


def _rotary(w: TensorScope, sizes: TextSizes, suffix: str, default: float) -> Rotary:
    base = sizes.metadata.get_positive(f"rope.freq_base{suffix}", default)
    return read_rotary(w, sizes, Pairs.NEOX, base=base)


def _gate(metadata: Metadata) -> Gate:
    """GeGLU, but SwiGLU in a few models (Granite Embedding 97M R2)."""
    curve = metadata.get(CURVE, str, "gelu")
    if curve not in GATES:
        raise UnsupportedModelError(
            f"{metadata.path}: `{metadata.full_key(CURVE)}` is {curve[:40]}, which is not "
            f"supported; {' and '.join(GATES)} are."
        )
    return GATES[curve]
