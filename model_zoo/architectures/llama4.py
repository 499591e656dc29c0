"""Llama 4, the text model."""

from model_zoo.conversion import checks, decoders
from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.mapping import Conversion, Key, Rule, Transform
from model_zoo.conversion.transforms import after_transposing, first_half, second_half, transposed
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import SelfAttention, Temperature
from model_zoo.layers.block import RowWise, read_block
from model_zoo.layers.decoder import Decoder, Layer
from model_zoo.layers.experts import Experts, ExpertSizes, sigmoid_of_chosen
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import read_rotary
from model_zoo.layers.sizes import Sizes
from runtime.kv.spec import Chunked, Full

# The values of both models, as in Llama4TextConfig of `transformers`.
DEFAULT_CHUNK, DEFAULT_BASE = 8192, 500_000.0
FULL_EVERY = 4
LARGEST = 128  # experts of the model that has no norms of queries and keys


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Most layers see their chunk of the positions; the others see all and do not turn.

    Rotary pairs are interleaved, as in the checkpoints. Vision tensors are left to others.
    """
    sizes = Sizes.read(metadata, head_dim=metadata.get("attention.head_dim", int))
    base = metadata.get_positive("rope.freq_base", DEFAULT_BASE)
    rotary = read_rotary(w, metadata, pairs=Pairs.INTERLEAVED, key_dim=sizes.key_dim, base=base)
    turning = _turning_layers(sizes)
    layers = [
        _layer(w.scope("blk", i), sizes, i, rotary if turning[i] else None)
        for i in range(sizes.layers)
    ]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: Sizes, index: int, rotary: Rotary | None) -> Layer:
    cache = sizes.cache(index, Full() if rotary is None else _kind(sizes))
    attention = SelfAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads[index],
        cache=cache,
        scale=sizes.key_dim**-0.5,
        turned_norm=None if rotary is None else _turned_norm(sizes),
        temperature=_temperature(sizes) if rotary is None else None,
    )
    return Layer(read_block(w, sizes, attention, _feed_forward(w, sizes, index)), cache, rotary)


def _feed_forward(w: TensorScope, sizes: Sizes, index: int) -> RowWise:
    step, hidden = sizes.metadata.get_size("interleave_moe_layer_step", 1), sizes.hidden
    if (index + 1) % step:
        return GatedFeedForward(w, hidden=hidden, size=sizes.feed_forward[index])
    shared = GatedFeedForward(
        w,
        hidden=hidden,
        size=sizes.metadata.require_size("expert_feed_forward_length"),
        gate="ffn_gate_shexp",
        up="ffn_up_shexp",
        down="ffn_down_shexp",
    )
    return Experts(
        w,
        hidden=hidden,
        sizes=ExpertSizes.read(sizes.metadata),
        routing=sigmoid_of_chosen,
        weigh_input=True,
        shared=shared,
    )


def _turning_layers(sizes: Sizes) -> tuple[bool, ...]:
    if _unchunked(sizes):
        return (True,) * sizes.layers
    interval = sizes.metadata.get_size("no_rope_interval", FULL_EVERY)
    return tuple((index + 1) % interval > 0 for index in range(sizes.layers))


def _kind(sizes: Sizes) -> Chunked | Full:
    if _unchunked(sizes):
        return Full()
    return Chunked(sizes.metadata.get_size("attention.chunk_size", DEFAULT_CHUNK))


def _unchunked(sizes: Sizes) -> bool:
    """Files of llama.cpp say so by a window of nought."""
    return sizes.metadata.get("attention.sliding_window", int) == 0


def _turned_norm(sizes: Sizes) -> RMSNorm | None:
    usual = sizes.metadata.get("expert_count", int) != LARGEST
    return RMSNorm(None, sizes.eps) if sizes.metadata.get("use_qk_norm", bool, usual) else None


def _temperature(sizes: Sizes) -> Temperature | None:
    metadata = sizes.metadata
    if not metadata.get("attention.temperature_tuning", bool, True):
        return None
    return Temperature(
        metadata.get_positive("attention.scale", 0.1),
        metadata.get_positive("attention.floor_scale", 8192.0),
        offset=1,
    )


def _has_experts(config: Configuration, layer: int) -> bool:
    step = config.require_size("interleave_moe_layer_step")
    listed = config.get("moe_layers")
    return layer in listed if listed else (layer + 1) % step == 0


def _no_rope_interval(config: Configuration) -> int:
    """Every how many layers one goes without rotation; a list must say the same."""
    interval = int(config.get("no_rope_layer_interval", 4))
    listed = config.get("no_rope_layers")
    if listed and [bool(rotated) for rotated in listed] != [
        (layer + 1) % interval != 0 for layer in range(config.layers)
    ]:
        raise config.error(f"has `no_rope_layers` other than every {interval}th layer")
    return interval


def _experts(name: str, target: str, transform: Transform) -> tuple[Rule, ...]:
    """Stored as [experts, in, out]; the gate's columns stand before those of up."""
    source = f"layers.{{n}}.feed_forward.experts.{name}"
    return (Rule(source, f"blk.{{n}}.{target}.weight", transform, each=True, only=_has_experts),)


CONVERSION = Conversion(
    serves=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    architecture="llama4",
    keys=(
        *(key for key in decoders.KEYS if key.name != "feed_forward_length"),
        Key("feed_forward_length", "intermediate_size_mlp"),
        Key("expert_feed_forward_length", "intermediate_size"),
        *decoders.EXPERT_COUNTS,
        Key("interleave_moe_layer_step", "interleave_moe_layer_step"),
        Key("no_rope_interval", _no_rope_interval),
        Key("use_qk_norm", "use_qk_norm", of=bool),
        Key("attention.head_dim", lambda c: c.head_dim),
        Key("attention.chunk_size", "attention_chunk_size"),
        Key("attention.temperature_tuning", "attn_temperature_tuning", of=bool),
        Key("attention.scale", "attn_scale", of=float),
        Key("attention.floor_scale", "floor_scale", of=int),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward("feed_forward", only=lambda c, n: not _has_experts(c, n)),
        Rule(
            "layers.{n}.feed_forward.router.weight",
            "blk.{n}.ffn_gate_inp.weight",
            only=_has_experts,
        ),
        *_experts("gate_up_proj", "ffn_gate_exps", after_transposing(first_half)),
        *_experts("gate_up_proj", "ffn_up_exps", after_transposing(second_half)),
        *_experts("down_proj", "ffn_down_exps", transposed),
        *(
            Rule(
                f"layers.{{n}}.feed_forward.shared_expert.{name}_proj.weight",
                f"blk.{{n}}.ffn_{name}_shexp.weight",
                only=_has_experts,
            )
            for name in ("gate", "up", "down")
        ),
        *decoders.PRE_NORMS,
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    drop=(*decoders.BUFFERS, *decoders.OTHER_PARTS),
    defaults={
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "num_experts_per_tok": 1,
    },
    check=checks.only_scalings("llama3"),
)
