"""SmolLM3: Llama without a rotation in every fourth layer."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes

UNROTATED_EVERY = 4  # as in llama.cpp; files do not state it


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k, also
    those of layers without rotation."""
    sizes = TextSizes.read(metadata)
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED)
    layers = [
        attention_layer(w.scope("blk", i), sizes, i, rotary if (i + 1) % UNROTATED_EVERY else None)
        for i in range(sizes.layers)
    ]
    return Decoder(w, sizes, layers)
