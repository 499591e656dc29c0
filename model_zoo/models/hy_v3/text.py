"""Hunyuan 3: attention as in Qwen 3, leading dense layers, then experts as in DeepSeek V3, one of
them shared."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.leading_dense import SIGMOID, stated_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    return uniform_decoder(w, sizes, Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """Layers without a router are dense. Unless the file states otherwise, the weights of experts
    are divided by their sum."""
    experts = None
    if w.has("ffn_gate_inp"):
        width = sizes.metadata.require_size("expert_feed_forward_length")
        experts = stated_experts(w, sizes, scores=SIGMOID, renormalised=True, shared_width=width)
    return attention_layer(
        w, sizes, index, rotary, attention=head_norms(w, sizes), feed_forward=experts
    )
