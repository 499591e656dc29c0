"""Ling and Ring 2.0: attention of Qwen 3 with partly rotated heads; experts of DeepSeek V3 after
leading dense layers."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.leading_dense import SIGMOID, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """`rope.dimension_count` states how much of a head is rotated."""
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=head_norms(w, sizes),
        feed_forward=leading_dense_or_experts(w, sizes, index, scores=SIGMOID),
    )
