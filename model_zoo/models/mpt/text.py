"""MPT: scores that fall with distance instead of positions, layer norms, no gates."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import falling_scores
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.feed_forward import FeedForward
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.pointwise import gelu_erf

_CLIP = "attention.clamp_kqv"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """GELU is exact, as in the authors' code; llama.cpp computes the approximation with tanh."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    layers = [_layer(w.scope("blk", i), sizes, i) for i in range(sizes.layers)]
    norm = w.layer_norm("output_norm", sizes.eps, size=sizes.hidden)
    return Decoder(w, sizes, layers, DecoderOptions(output_norm=norm))


def _layer(w: TensorScope, sizes: TextSizes, index: int) -> TextLayer:
    metadata, size = sizes.metadata, sizes.feed_forward[index]
    most = metadata.get_positive("attention.max_alibi_bias")
    clip = metadata.get_positive(_CLIP) if metadata.has(_CLIP) else None
    return attention_layer(
        w,
        sizes,
        index,
        None,
        attention=replace(falling_scores(sizes, index, w.device, most=most), clip=clip),
        feed_forward=FeedForward(w, hidden=sizes.hidden, size=size, curve=gelu_erf),
        block=BlockOptions(layer_norms=True, norm_biases=False),
    )
