"""Parts of conversion tables for multi-head latent attention."""

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Rule

ATTENTION = "layers.{n}.self_attn"


def query_size(config: Configuration) -> int:
    """Both parts of a head's query, without and with rotary embedding."""
    return config.require_size("qk_nope_head_dim") + config.require_size("qk_rope_head_dim")


def _compresses_queries(config: Configuration, layer: int) -> bool:
    return config.get("q_lora_rank") is not None


# Everything except `kv_b_proj`, of which files have two matrices or one.
PROJECTIONS = (
    Rule(f"{ATTENTION}.q_proj.*", "blk.{n}.attn_q.*", optional=True),
    *(
        Rule(f"{ATTENTION}.{source}", f"blk.{{n}}.{target}", only=_compresses_queries)
        for source, target in (
            ("q_a_proj.*", "attn_q_a.*"),
            ("q_a_layernorm.weight", "attn_q_a_norm.weight"),
            ("q_b_proj.*", "attn_q_b.*"),
        )
    ),
    Rule(f"{ATTENTION}.kv_a_proj_with_mqa.*", "blk.{n}.attn_kv_a_mqa.*"),
    Rule(f"{ATTENTION}.kv_a_layernorm.weight", "blk.{n}.attn_kv_a_norm.weight"),
    Rule(f"{ATTENTION}.o_proj.*", "blk.{n}.attn_output.*"),
)
