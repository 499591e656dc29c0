"""LFM2, dense and with experts: gated short convolutions, and attention in some layers."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention, head_norms
from model_zoo.layers.block import Block, BlockOptions, Mixer, RowWise
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.gated_convolution import GatedConvolution, convolution_width
from model_zoo.layers.hybrid import key_heads, without_key_heads
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import Full


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers without key heads are convolutions. The norm before the head is `token_embd_norm` in
    files of llama.cpp and `output_norm` in those of Ollama."""
    sizes = TextSizes.read(metadata, kv_heads=key_heads(metadata))
    width = convolution_width(metadata)
    convolves = without_key_heads(metadata) or (False,) * sizes.layers
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    layers = []
    for index in range(sizes.layers):
        scope = w.scope("blk", index)
        if convolves[index]:
            layers.append(_convolving_layer(scope, sizes, width, index))
        else:
            layers.append(_attending_layer(scope, sizes, index, rotary))
    norm = w.rms_norm("token_embd_norm", sizes.eps, size=sizes.hidden, alt="output_norm")
    return Decoder(w, sizes, layers, DecoderOptions(output_norm=norm))


def _convolving_layer(w: TensorScope, sizes: TextSizes, width: int, index: int) -> TextLayer:
    convolution = GatedConvolution(w, hidden=sizes.hidden, width=width)
    return TextLayer(_block(w, sizes, convolution, index), convolution.cache)


def _attending_layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    cache = sizes.cache(index, Full())
    attention = SelfAttention(w, sizes, index, cache, head_norms(w, sizes))
    return TextLayer(_block(w, sizes, attention, index), cache, rotary)


def _block(w: TensorScope, sizes: TextSizes, mixer: Mixer, index: int) -> Block:
    return BlockOptions().read(w, sizes, mixer, _feed_forward(w, sizes, index))


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    """Files state neither that weights of experts are renormalised nor a shared expert."""
    if not sizes.metadata.get("expert_count", int, 0):
        return GatedFeedForward(w, hidden=sizes.hidden, size=_width(w, sizes, index))
    return leading_dense_or_experts(w, sizes, index, scores=SIGMOID, renormalised=True)


def _width(w: TensorScope, sizes: TextSizes, index: int) -> int:
    """The width of the matrices, or as stated where they differ. Files of Ollama state the width
    from which LFM2 computes it."""
    gate, up = (w.shape(name) for name in ("ffn_gate", "ffn_up"))
    if gate is not None and gate == up and gate[0]:
        return gate[0]
    return sizes.feed_forward[index]
