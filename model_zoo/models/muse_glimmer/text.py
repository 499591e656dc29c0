"""Muse Glimmer: gated attention with windows, norms before and after each part."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import OutputGate, head_norms
from model_zoo.layers.attention_layer import alternating_layers, attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import CacheKind, Full, Sliding

FULL_EVERY = 4  # as in llama.cpp
POST_NORM_EPS = 1e-8  # as in MuseGlimmerTextConfig of `transformers`; files do not state it


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers with a window are rotated, those that attend to all tokens are not. Rotary pairs are
    interleaved: converters have permuted the rows of attn_q and attn_k, and made weights of head
    norms from the factor of queries."""
    sizes = TextSizes.read(metadata)
    rotary = read_rotary(w, sizes, Pairs.INTERLEAVED)
    window = Sliding(metadata.require_size("attention.sliding_window"))
    slides, near, far = sizes.sliding_layers(FULL_EVERY), (window, rotary), (Full(), None)
    layers = alternating_layers(w, sizes, slides, _layer, near=near, far=far)
    options = DecoderOptions(
        embedding_norm=RMSNorm(None, sizes.eps),
        images_as_tokens=True,
        logit_scale=metadata.get_positive("logit_scale"),
        logit_softcap=sizes.cap("final_logit_softcapping"),
        own_head=True,
    )
    return Decoder(w, sizes, layers, options)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, kind: CacheKind, rotary: Rotary | None
) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        kind=kind,
        attention=replace(head_norms(w, sizes), output_gate=OutputGate.APART),
        block=BlockOptions(post_norms=True, post_norm_eps=POST_NORM_EPS),
    )
