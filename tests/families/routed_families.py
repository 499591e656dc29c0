"""The rows of GroveMoE and SmallThinker in the table of text families."""

from collections.abc import Mapping

from transformers import LlamaConfig, Qwen3MoeConfig

from tests.families.routed_twins import GroveMoeMaker, SmallThinkerMaker
from tests.families.text_family import SIZES, TIED, WIDE_HEADS, CompleteFile, TextFamily, rope

SMALLTHINKER = SIZES | {
    "head_dim": 16,
    **rope(1.5e6),
    "moe_num_primary_experts": 6,
    "moe_num_active_primary_experts": 2,
    "moe_ffn_hidden_size": 48,
    "moe_primary_router_apply_softmax": False,
    "sliding_window_size": 9,
}
WINDOWS = [0, 1, 1, 1, 0]

FAMILIES: Mapping[str, TextFamily] = {
    "grovemoe": TextFamily(
        Qwen3MoeConfig,
        SIZES
        | rope(1e6)
        | {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {"plain": {}},
        wide=WIDE_HEADS | {"moe_intermediate_size": 256},
        options={"maker": GroveMoeMaker},
        effective_keys={"expert_group_scale": 0.5},
        refused=[({"experts_per_group": 4}, "does not divide 6 experts")],
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length expert_feed_forward_length
                    feed_forward_length
                """
            ),
        ),
    ),
    "smallthinker": TextFamily(
        LlamaConfig,
        SMALLTHINKER,
        {
            "plain": {
                "num_hidden_layers": 5,
                "sliding_window_layout": WINDOWS,
                "rope_layout": WINDOWS,
            },
            "softmax_without_windows_tied": TIED
            | {
                "moe_primary_router_apply_softmax": True,
                "sliding_window_layout": [0, 0],
                "rope_layout": [1, 1],
            },
        },
        wide=None,
        options={"maker": SmallThinkerMaker},
        effective_keys={"attention.sliding_window": 10, "expert_gating_func": 1},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.sliding_window attention.value_length
                    expert_feed_forward_length expert_gating_func feed_forward_length
                """
            ),
        ),
    ),
}
