"""Llama 1 to 3, Mistral 7B, Nemo, Mixtral, InternLM 2, Baichuan, Refact, XVERSE, and their
derivatives, also bidirectional ones."""

from model_zoo.families import only_embeds
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import falling_scores
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import experts_or_dense
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE, read_rotary
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder
from model_zoo.layers.text_sizes import TextSizes

# As in LlamaConfig of `transformers`; Ollama's converter omits the key if settings lack it.
DEFAULT_EPS = 1e-6
# As in MixtralConfig; the settings of the authors' original checkpoints lack it.
MIXTRAL_BASE = 1_000_000.0
REFACT = "refact"
# Baichuan 13B has this number of layers, by which llama.cpp identifies it.
BAICHUAN, FALLING_LAYERS = "baichuan", 40


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder | TextEncoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k. In the
    architecture `llama-embed`, tokens attend to all others. In Refact and Baichuan 13B, scores fall
    with distance instead of a rotation.

    The key `attention.sliding_window` of Mistral 7B v0.1 is ignored, as in Ollama.
    """
    sizes = TextSizes.read(metadata, eps=DEFAULT_EPS)
    rotary = None if _scores_fall(sizes) else _rotary(w, sizes)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    if not only_embeds(metadata.architecture):
        return Decoder(w, sizes, layers)
    w.ignore("output")
    norm = w.rms_norm("output_norm", sizes.eps, size=sizes.hidden)
    return TextEncoder(w, sizes, layers, EncoderOptions(output_norm=norm))


def _scores_fall(sizes: TextSizes) -> bool:
    architecture = sizes.metadata.architecture
    return architecture == REFACT or (architecture == BAICHUAN and sizes.layers == FALLING_LAYERS)


def _rotary(w: TensorScope, sizes: TextSizes) -> Rotary:
    mixed = sizes.metadata.get("expert_count", int, 0) > 0
    usual = MIXTRAL_BASE if mixed else DEFAULT_BASE
    return read_rotary(w, sizes, Pairs.INTERLEAVED, dim=_rotated(sizes), default_base=usual)


def _rotated(sizes: TextSizes) -> int | None:
    """The number of rotated dimensions of a head. For Mistral Nemo, Ollama's converter states
    hidden / heads, which exceeds the head size."""
    stated = sizes.metadata.get("rope.dimension_count", int, sizes.key_dim)
    slip = stated == sizes.hidden // sizes.heads[0] > sizes.key_dim
    return sizes.key_dim if slip else None


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary | None) -> TextLayer:
    """rotary: None for scores that fall with distance."""
    w.ignore("attn_rot_embd")  # rotary frequencies that old converters stored
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=falling_scores(sizes, index, w.device) if rotary is None else None,
        feed_forward=experts_or_dense(w, sizes, index),
    )
