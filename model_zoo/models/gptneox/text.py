"""GPT-NeoX, Pythia, Dolly 2 and StableLM Alpha: layer norms, biases everywhere, and feed-forwards
without gate."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions, ParallelOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm, uniform_decoder
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_erf

BIASED = (
    "attn_norm", "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_up",
    "ffn_down",
)  # fmt: skip


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """A part of each head is rotated. llama.cpp's converter does not state the base of rotation."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    options = biased_output_norm(w, sizes)
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer, default_base=DEFAULT_BASE, options=options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """Attention and feed-forward are in parallel, each after its own norm, unless the file states
    otherwise."""
    w.need_biases(*BIASED)
    size = sizes.feed_forward[index]
    feed_forward = FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu_erf)
    parallel = sizes.metadata.get("use_parallel_residual", bool, True)
    block = ParallelOptions(ffn_norm="ffn_norm") if parallel else BlockOptions(layer_norms=True)
    return attention_layer(w, sizes, index, rotary, feed_forward=feed_forward, block=block)
