"""Qwen 3 Next and Qwen 3.5: most layers are gated delta nets, every fourth one attends."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention
from model_zoo.layers.block import Block, RowWise
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.delta_net import DeltaSizes, GatedDeltaNet
from model_zoo.layers.experts import Experts, ExpertSizes, stated_softmax
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.hybrid import read_sizes, recurrent_layers
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.shared_expert import SharedExpert
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Full


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Layers that attend gate what their heads have seen; experts or one feed-forward."""
    sizes, delta = read_sizes(w, metadata), DeltaSizes.read(metadata)
    base = metadata.get_positive("rope.freq_base")
    rotary = read_rotary(w, metadata, pairs=Pairs.NEOX, key_dim=sizes.key_dim, base=base)
    recurrent = recurrent_layers(sizes)
    layers = []
    for index in range(sizes.layers):
        scope = w.scope("blk", index)
        if recurrent[index]:
            layers.append(_recurrent_layer(scope, sizes, delta, index))
        else:
            layers.append(_attending_layer(scope, sizes, index, rotary))
    return Decoder(w, sizes, layers)


def _recurrent_layer(w: TensorScope, sizes: Sizes, delta: DeltaSizes, index: int) -> Layer:
    """Files with all gates in one matrix keep the authors' order of heads. Others state theirs; the
    default is that of llama.cpp's converter."""
    tiled = sizes.metadata.get("ssm.v_head_reordered", bool, not w.has("ssm_ba"))
    net = GatedDeltaNet(w, hidden=sizes.hidden, sizes=delta, eps=sizes.eps, tiled=tiled)
    return Layer(_block(w, sizes, net, index), delta.cache)


def _attending_layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary) -> Layer:
    cache = sizes.cache(index, Full())
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
        q_norm=w.rms_norm("attn_q_norm", sizes.eps, size=sizes.key_dim),
        k_norm=w.rms_norm("attn_k_norm", sizes.eps, size=sizes.key_dim),
        output_gate=True,
    )
    return Layer(_block(w, sizes, attention, index), cache, rotary)


def _block(w: TensorScope, sizes: Sizes, mixer: GatedDeltaNet | SelfAttention, index: int) -> Block:
    attn_norm, ffn_norm = (
        w.rms_norm(name, sizes.eps, size=sizes.hidden)
        for name in ("attn_norm", "post_attention_norm")
    )
    return Block(attn_norm, mixer, ffn_norm, _feed_forward(w, sizes, index))


def _feed_forward(w: TensorScope, sizes: Sizes, index: int) -> RowWise:
    metadata = sizes.metadata
    if not metadata.has("expert_count"):
        return GatedFeedForward(w, hidden=sizes.hidden, size=sizes.feed_forward[index])
    return Experts(
        w,
        hidden=sizes.hidden,
        sizes=ExpertSizes.read(metadata),
        routing=stated_softmax(metadata),
        shared=SharedExpert(w, hidden=sizes.hidden, size=_shared_width(w, metadata)),
    )


def _shared_width(w: TensorScope, metadata: Metadata) -> int:
    """From the key, else from the tensor: Ollama's converter omits the key if settings lack it."""
    key, shape = "expert_shared_feed_forward_length", w.shape("ffn_gate_shexp")
    return shape[0] if shape and not metadata.has(key) else metadata.require_size(key)
