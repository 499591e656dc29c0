"""StableLM 3B, Zephyr 3B, Stable Code 3B, StableLM 2, of which a part of each head is rotated, and
Orion: layer norms."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_layer_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions, ParallelOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm, uniform_decoder
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.text_sizes import TextSizes

ORION = "orion"
# The base of Stable Code 3B (Pinnaparaju et al., "Stable Code Technical Report"), the only model of
# the authors with this context; those with 4,096 tokens have the default.
STABLE_CODE_CONTEXT, STABLE_CODE_BASE = 16_384, 1_000_000.0


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """In StableLM 2 12B, queries and keys of each head are normed, and attention and feed-forward
    are in parallel. llama.cpp's converter does not state the base of rotation."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    options = biased_output_norm(w, sizes)
    code = metadata.architecture != ORION and sizes.context_length == STABLE_CODE_CONTEXT
    usual = STABLE_CODE_BASE if code else DEFAULT_BASE
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, default_base=usual, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """As in llama.cpp, layers without a second norm are parallel, whatever the file states."""
    attention = head_layer_norms(w, sizes, index)
    w.need_biases("attn_norm")
    block = BlockOptions(layer_norms=True) if w.has("ffn_norm") else ParallelOptions()
    return attention_layer(w, sizes, index, rotary, attention=attention, block=block)
