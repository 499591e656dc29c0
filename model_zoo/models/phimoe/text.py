"""Phi 3.5 MoE: experts, layer norms and biases."""

from dataclasses import replace
from math import isclose, sqrt

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, biased_output_norm
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.routing import Routing, Scores

# Twice `router_jitter_noise` of PhimoeConfig of `transformers`; files do not state it.
NEAR = 0.02
# `short_mscale` and `long_mscale` in config.json of microsoft/Phi-3.5-MoE-instruct, and what
# llama.cpp's converter writes instead: the factor of LongRoPE's paper, sqrt(1 + ln 32 / ln 4096).
MAGNITUDE, CONVERTED_MAGNITUDE = 1.243163121016122, sqrt(17 / 12)


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The norms are layer norms as in the authors' code, although files call their epsilon that of
    RMS norms, which llama.cpp computes instead. All layers have a window, if the file states
    one."""
    sizes = TextSizes.read(metadata)
    w.need_biases("output")
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    if isclose(rotary.magnitude, CONVERTED_MAGNITUDE, rel_tol=1e-6):
        rotary = replace(rotary, magnitude=MAGNITUDE)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    options = replace(biased_output_norm(w, sizes), own_head=True)
    return Decoder(w, sizes, layers, options)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """The weight of each of a row's experts is near one, as in the authors' code; llama.cpp divides
    the weights by their sum."""
    w.need_biases("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output")
    options = ExpertOptions(routing=Routing(Scores.SOFTMAX_OF_NEAR, near=NEAR))
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=sizes.window(),
        feed_forward=Experts.read(w, sizes, options),
        block=BlockOptions(layer_norms=True),
    )
