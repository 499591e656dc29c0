"""The rows of the Hunyuan models in the table of text families."""

from collections.abc import Mapping

from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config

from tests.families.text_family import (
    SIZES,
    TIED,
    WIDE_HEADS,
    CompleteFile,
    TextFamily,
    Variant,
    rope,
)

HUNYUAN = SIZES | rope(10000.0) | {"head_dim": 32}
STRETCHED = rope(10000.0, rope_type="dynamic", alpha=50.0, factor=1.0)
OTHER_SPELLING = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.original_context_length": 262144,
}

FAMILIES: Mapping[str, TextFamily] = {
    "hunyuan-dense": TextFamily(
        HunYuanDenseV1Config,
        HUNYUAN,
        {
            "plain": {},
            "stretched_base": STRETCHED,
            "tied_with_biases": TIED | {"attention_bias": True, "num_key_value_heads": 4},
        },
        wide=WIDE_HEADS,
    ),
    "hunyuan-moe": TextFamily(
        HunYuanMoEV1Config,
        HUNYUAN | {"num_experts": 6, "moe_topk": 2},
        {
            "plain": {},
            "stretched_base": STRETCHED,
            "tied_with_one_expert_per_token": TIED | {"moe_topk": [1, 1]},
        },
        wide=WIDE_HEADS,
        variants={"published": Variant(keys=OTHER_SPELLING)},
        files=(
            CompleteFile(
                optional_keys="""
                    expert_shared_count expert_feed_forward_length
                    expert_shared_feed_forward_length
                """
            ),
        ),
    ),
}
