"""OLMo 1: layer norms without weights; queries, keys and values may be clipped."""

import torch

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions, SelfAttention
from model_zoo.layers.block import Block
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer, uniform_decoder
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import LayerNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import Full

_CLIP = "attention.clamp_kqv"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Rotary pairs are interleaved: converters have permuted the rows of attn_q and attn_k."""
    sizes = TextSizes.read(metadata, eps=metadata.get_positive("attention.layer_norm_epsilon"))
    options = DecoderOptions(output_norm=_norm(w, sizes))
    return uniform_decoder(w, sizes, Pairs.INTERLEAVED, _layer, options=options)


def _norm(w: TensorScope, sizes: TextSizes) -> LayerNorm:
    ones = torch.ones(sizes.hidden, device=w.device)
    return LayerNorm(ones, torch.zeros_like(ones), sizes.eps)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    cache, norm = sizes.cache(index, Full()), _norm(w, sizes)
    clip = sizes.metadata.get_positive(_CLIP) if sizes.metadata.has(_CLIP) else None
    block = Block(
        norm,
        SelfAttention(w, sizes, index, cache, AttentionOptions(clip=clip)),
        norm,
        GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index]),
    )
    return TextLayer(block, cache, rotary)
