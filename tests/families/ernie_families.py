"""The rows of the ERNIE models in the table of text families."""

from collections.abc import Mapping

from transformers import Ernie4_5_MoeConfig, Ernie4_5Config

from tests.families.text_family import SIZES, WIDE, WIDE_HEADS, CompleteFile, TextFamily, rope

EXPERTS = {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 32,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_k": 3,
}

FAMILIES: Mapping[str, TextFamily] = {
    "ernie4_5": TextFamily(
        Ernie4_5Config,
        SIZES | rope(5e5) | {"head_dim": 32},
        {"plain": {}, "biases_and_own_head": {"use_bias": True, "tie_word_embeddings": False}},
        wide=WIDE_HEADS,
        divided="biases_and_own_head",
    ),
    "ernie4_5-moe": TextFamily(
        Ernie4_5_MoeConfig,
        SIZES | rope(5e5) | EXPERTS,
        {
            "plain": {},
            "every_other_layer_without_shared_expert": {
                "moe_layer_start_index": 2,
                "moe_layer_interval": 2,
                "moe_num_shared_experts": 0,
            },
        },
        wide=WIDE | {"moe_intermediate_size": 256},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length interleave_moe_layer_step
                    expert_feed_forward_length expert_shared_count
                    expert_shared_feed_forward_length
                """
            ),
        ),
    ),
}
