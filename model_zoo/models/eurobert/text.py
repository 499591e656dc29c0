"""EuroBERT: an encoder with the layers of Llama."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_encoder import EncoderOptions, TextEncoder
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> TextEncoder:
    """RMS norms before attention and feed-forward, SwiGLU, rotary positions, no biases."""
    sizes = TextSizes.read(metadata)
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    layers = [attention_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    norm = w.rms_norm("output_norm", sizes.eps, size=sizes.hidden)
    return TextEncoder(w, sizes, layers, EncoderOptions(output_norm=norm))
