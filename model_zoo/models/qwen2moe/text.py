"""Qwen 1.5 MoE and Qwen 2 57B: Qwen 2 with experts and a gated shared one."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.leading_dense import SOFTMAX, stated_routing
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.shared_expert import SharedExpert
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Queries, keys and values have biases; experts are in every layer."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """The weights of a row's experts are probabilities over all experts, unless the file states
    otherwise."""
    w.need_biases("attn_qkv", "attn_q", "attn_k", "attn_v")
    counts, hidden = ExpertSizes.read(sizes.metadata), sizes.hidden
    options = ExpertOptions(
        routing=stated_routing(w, sizes.metadata, counts.count, SOFTMAX),
        shared=SharedExpert(w, hidden=hidden, size=_shared_width(sizes, index)),
    )
    experts = Experts(w, hidden, counts, options)
    return attention_layer(w, sizes, index, rotary, feed_forward=experts)


def _shared_width(sizes: TextSizes, index: int) -> int:
    """The width of the shared expert: as stated, else that of dense layers, as in llama.cpp."""
    key = "expert_shared_feed_forward_length"
    if sizes.metadata.has(key):
        return sizes.metadata.require_size(key)
    return sizes.feed_forward[index]
