"""Parts of conversion tables for multi-head latent attention."""

from collections.abc import Callable

from torch import Tensor

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Key, Rule

ATTENTION = "layers.{n}.self_attn"
# Whether a rule applies to a layer.
Only = Callable[[Configuration, int], bool]


def everywhere(config: Configuration, layer: int) -> bool:
    return True


def query_size(config: Configuration) -> int:
    """Both parts of a head's query, without and with rotary embedding."""
    return config.require_size("qk_nope_head_dim") + config.require_size("qk_rope_head_dim")


def _cached(config: Configuration) -> int:
    return config.require_size("kv_lora_rank") + config.require_size("qk_rope_head_dim")


def _heads(config: Configuration, rows: Tensor) -> tuple[Tensor, Tensor]:
    """kv_b_proj (heads * (plain + value), latent) -> (heads, plain, latent), (heads, value, ..)."""
    sizes = config.require_size("qk_nope_head_dim"), config.require_size("v_head_dim")
    keys, values = rows.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return keys, values


def _to_keys(config: Configuration, rows: Tensor) -> Tensor:
    return _heads(config, rows)[0].transpose(1, 2)


def _to_values(config: Configuration, rows: Tensor) -> Tensor:
    return _heads(config, rows)[1]


SIZES = (
    Key("attention.key_length", _cached, flavours=(LLAMA_CPP,)),
    Key("attention.value_length", "kv_lora_rank", flavours=(LLAMA_CPP,)),
    Key("attention.key_length_mla", query_size, flavours=(LLAMA_CPP,)),
    Key("attention.value_length_mla", "v_head_dim", flavours=(LLAMA_CPP,)),
    Key("attention.q_lora_rank", "q_lora_rank", optional=True),
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("rope.dimension_count", "qk_rope_head_dim"),
)


def projections(only: Only = everywhere) -> tuple[Rule, ...]:
    """Rules for the layers for which `only` holds. Without `kv_b_proj`, of which files have two
    matrices or one."""

    def compressed(config: Configuration, layer: int) -> bool:
        return only(config, layer) and config.get("q_lora_rank") is not None

    of_queries = (
        ("q_a_proj.*", "attn_q_a.*"),
        ("q_a_layernorm.weight", "attn_q_a_norm.weight"),
        ("q_b_proj.*", "attn_q_b.*"),
    )
    others = (
        ("kv_a_proj_with_mqa.*", "attn_kv_a_mqa.*"),
        ("kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
        ("o_proj.*", "attn_output.*"),
    )
    return (
        Rule(f"{ATTENTION}.q_proj.*", "blk.{n}.attn_q.*", optional=True, only=only),
        *(
            Rule(f"{ATTENTION}.{source}", f"blk.{{n}}.{target}", only=condition)
            for pairs, condition in ((of_queries, compressed), (others, only))
            for source, target in pairs
        ),
    )


def head_matrices(only: Only = everywhere) -> tuple[Rule, ...]:
    """Rules for `kv_b_proj`: llama.cpp's files have a matrix of keys and one of values."""
    targets = (
        ("attn_k_b", _to_keys, LLAMA_CPP),
        ("attn_v_b", _to_values, LLAMA_CPP),
        ("attn_kv_b", None, OLLAMA),
    )
    return tuple(
        Rule(
            f"{ATTENTION}.kv_b_proj.weight",
            f"blk.{{n}}.{target}.weight",
            transform,
            only=only,
            flavours=(flavour,),
        )
        for target, transform, flavour in targets
    )
