"""The rows of the Hunyuan models in the table of text families."""

from collections.abc import Mapping
from typing import Any

from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config, HunYuanVLConfig

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


def hunyuan_vl_rope(*sections: int) -> dict[str, Any]:
    stated = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    return rope(10000.0, **stated, mrope_section=list(sections))


HUNYUAN_VL = SIZES | hunyuan_vl_rope(5, 4, 4, 3) | {"head_dim": 32}
HUNYUAN_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "patch_size": 8,
    "max_image_size": 56,
}


def hunyuan_vl(text: Mapping[str, Any] = HUNYUAN_VL, **vision: Any) -> HunYuanVLConfig:
    tied = text.get("tie_word_embeddings", True)
    return HunYuanVLConfig(
        text_config=dict(text), vision_config=HUNYUAN_VISION | vision, tie_word_embeddings=tied
    )


def hunyuan_vl_text(**text: Any) -> HunYuanVLConfig:
    return hunyuan_vl(text)


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
        # As former converters of llama.cpp wrote what settings of dense models state.
        variants={"counts_one": Variant(keys={"expert_count": 1, "expert_used_count": 1})},
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
    "hunyuan_vl": TextFamily(
        hunyuan_vl_text,
        HUNYUAN_VL,
        {"plain": {}, "own_head": {"tie_word_embeddings": False}},
        wide=WIDE_HEADS | hunyuan_vl_rope(8, 8, 8, 8),
        files=(CompleteFile(optional_keys="rope.scaling.alpha"),),
    ),
}
