"""Hunyuan V1, dense and with experts, the text model of HunyuanOCR and Hunyuan-VL, and Maincoder:
norms of queries and keys follow the rotation."""

import torch

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import derived
from model_zoo.layers.attention import AttentionOptions
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import RowWise
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.rope_sections import in_sections
from model_zoo.layers.text_sizes import TextSizes

MAINCODER = "maincoder"
SHARED = "expert_shared_feed_forward_length"
STRETCH = "rope.scaling.alpha"
# Frequencies for token, column, row and image, in all models with vision.
SECTIONS = (16, 16, 16, 16)


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    sizes = TextSizes.read(metadata)
    rotary = _rotary(w, sizes)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _rotary(w: TensorScope, sizes: TextSizes) -> Rotary:
    """Converters have stretched `rope.freq_base` for long contexts; files of models with vision
    state the stretch."""
    metadata, dim = sizes.metadata, sizes.key_dim
    if metadata.architecture == MAINCODER:
        return read_rotary(w, sizes, Pairs.INTERLEAVED)
    if metadata.architecture != "hunyuan_vl":
        return read_rotary(w, sizes, Pairs.NEOX)
    stretch = metadata.get_positive(STRETCH, 1.0) ** (dim / max(dim - 2, 1))
    base = metadata.get_positive("rope.freq_base") * stretch
    rotary = read_rotary(w, sizes, Pairs.NEOX, base=base)
    return in_sections(rotary, metadata, default=SECTIONS, interleaved=False, position_axes=4)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=_rotated_norms(w, sizes),
        feed_forward=_feed_forward(w, sizes, index),
    )


def _rotated_norms(w: TensorScope, sizes: TextSizes) -> AttentionOptions:
    """The weights of keys multiply the queries instead, which gives the same scores: with weights,
    cached keys could not be rotated to other positions."""
    queries, keys = (w.vector(f"attn_{name}_norm", size=sizes.key_dim) for name in ("q", "k"))
    weight = derived(torch.mul, queries, keys)
    return AttentionOptions(
        rotated_q_norm=RMSNorm(weight, sizes.eps), rotated_k_norm=RMSNorm(None, sizes.eps)
    )


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    """SwiGLU, or experts and a shared one, which is as wide as a dense feed-forward if the file
    states no width. Some files of dense models count one expert, as their settings do."""
    dense = sizes.feed_forward[index]
    if sizes.metadata.get("expert_count", int, 0) <= 1:
        return GatedFeedForward(w, hidden=sizes.hidden, size=dense)
    width = sizes.metadata.get_size(SHARED, dense)
    shared = GatedFeedForward(w, hidden=sizes.hidden, size=width, suffix="_shexp")
    return Experts.read(w, sizes, ExpertOptions(shared=shared))
