"""Qwen 3 Next and Qwen 3.5: gated delta nets, and attention in every fourth layer."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import OutputGate, SelfAttention, head_norms
from model_zoo.layers.block import Block, BlockOptions, RowWise
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.delta_net import GatedDeltaNet
from model_zoo.layers.experts import ExpertOptions, Experts
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.rope_sections import in_sections
from model_zoo.layers.routing import stated_softmax
from model_zoo.layers.shared_expert import SharedExpert
from model_zoo.layers.state_sizes import StateSizes
from model_zoo.layers.text_sizes import TextSizes
from runtime.kv.cache_kinds import Full

# As in Qwen3NextConfig and Qwen3_5TextConfig of `transformers`.
DEFAULT_HEAD_DIM, FULL_EVERY, SECTIONS = 256, 4, (11, 11, 10)


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Attention outputs are gated; all layers have experts or a dense feed-forward.

    Qwen 3.5 rotates by time, row and column, interleaved.
    """
    sizes = read_sizes(w, metadata, head_dim=DEFAULT_HEAD_DIM)
    delta = StateSizes.read(metadata)
    rotary = read_rotary(w, sizes, Pairs.NEOX)
    if metadata.architecture != "qwen3next":
        rotary = in_sections(rotary, metadata, default=SECTIONS, interleaved=True)
    recurrent = recurrent_layers(sizes, full_every=FULL_EVERY)
    layers = []
    for index in range(sizes.layers):
        scope = w.scope("blk", index)
        if recurrent[index]:
            layers.append(_recurrent_layer(scope, sizes, delta, index))
        else:
            layers.append(_attending_layer(scope, sizes, index, rotary))
    return Decoder(w, sizes, layers)


def _recurrent_layer(w: TensorScope, sizes: TextSizes, delta: StateSizes, index: int) -> TextLayer:
    """Files with all gates in one matrix keep the authors' order of heads; others state the order,
    by default that of llama.cpp's converter."""
    tiled = sizes.metadata.get("ssm.v_head_reordered", bool, not w.has("ssm_ba"))
    net = GatedDeltaNet(w, hidden=sizes.hidden, sizes=delta, eps=sizes.eps, tiled=tiled)
    return TextLayer(_block(w, sizes, net, index), delta.cache)


def _attending_layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    cache = sizes.cache(index, Full())
    options = replace(head_norms(w, sizes), output_gate=OutputGate.WITH_QUERIES)
    attention = SelfAttention(w, sizes, index, cache, options)
    return TextLayer(_block(w, sizes, attention, index), cache, rotary)


def _block(
    w: TensorScope, sizes: TextSizes, mixer: GatedDeltaNet | SelfAttention, index: int
) -> Block:
    options = BlockOptions(ffn_norm="post_attention_norm")
    return options.read(w, sizes, mixer, _feed_forward(w, sizes, index))


def _feed_forward(w: TensorScope, sizes: TextSizes, index: int) -> RowWise:
    metadata = sizes.metadata
    if not metadata.get("expert_count", int, 0):
        return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    options = ExpertOptions(
        routing=stated_softmax(metadata),
        shared=SharedExpert(w, hidden=sizes.hidden, size=_shared_width(w, metadata)),
    )
    return Experts.read(w, sizes, options)


def _shared_width(w: TensorScope, metadata: Metadata) -> int:
    """The width of the shared expert: stated, else that of the tensor. Ollama's converter omits
    the key if settings lack it."""
    key, shape = "expert_shared_feed_forward_length", w.shape("ffn_gate_shexp")
    return shape[0] if shape and not metadata.has(key) else metadata.require_size(key)
