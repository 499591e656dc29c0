"""Llama 1 to 3, Mistral 7B, Nemo, Mixtral, InternLM 2, Baichuan 7B, and their derivatives, also
bidirectional ones."""

from model_zoo.families import only_embeds
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import experts_or_dense
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE, read_rotary
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder
from model_zoo.layers.text_sizes import TextSizes
from runtime.errors import UnsupportedModelError

# As in LlamaConfig of `transformers`; Ollama's converter omits the key if settings lack it.
DEFAULT_EPS = 1e-6
# As in MixtralConfig; the settings of the authors' original checkpoints lack it.
MIXTRAL_BASE = 1_000_000.0
# Baichuan 13B has this number of layers, by which llama.cpp identifies it.
BAICHUAN, ALIBI_LAYERS = "baichuan", 40


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder | TextEncoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k. In the
    architecture `llama-embed`, tokens attend to all others.

    The key `attention.sliding_window` of Mistral 7B v0.1 is ignored, as in Ollama.
    """
    sizes = TextSizes.read(metadata, eps=DEFAULT_EPS)
    if metadata.architecture == BAICHUAN and sizes.layers == ALIBI_LAYERS:
        raise UnsupportedModelError(
            f"{metadata.path}: Baichuan 13B has linear biases of attention (ALiBi), which are not "
            "supported; Baichuan 7B is."
        )
    usual = MIXTRAL_BASE if metadata.get("expert_count", int, 0) > 0 else DEFAULT_BASE
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED, dim=_rotated(sizes), default_base=usual)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    if not only_embeds(metadata.architecture):
        return Decoder(w, sizes, layers)
    w.ignore("output")
    norm = w.rms_norm("output_norm", sizes.eps, size=sizes.hidden)
    return TextEncoder(w, sizes, layers, EncoderOptions(output_norm=norm))


def _rotated(sizes: TextSizes) -> int | None:
    """The number of rotated dimensions of a head. For Mistral Nemo, Ollama's converter states
    hidden / heads, which exceeds the head size."""
    stated = sizes.metadata.get("rope.dimension_count", int, sizes.key_dim)
    slip = stated == sizes.hidden // sizes.heads[0] > sizes.key_dim
    return sizes.key_dim if slip else None


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.ignore("attn_rot_embd")  # rotary frequencies that old converters stored
    feed_forward = experts_or_dense(w, sizes, index)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward)
