"""MiniMax M3 with its vision model, in the tables of towers and of whole vision models."""

from typing import Any

from transformers import MiniMaxM3VLConfig, MiniMaxM3VLTextConfig

from model_zoo.models.minimax_m3.placeholders import OTHER, PLACE, TEXTS
from model_zoo.models.minimax_m3.vision import minimax_tower
from tests.families import tower_references
from tests.families.text_family import SIZES, rope
from tests.families.tower_builders import with_211_rows
from tests.families.tower_family import TowerFamily
from tests.families.tower_inputs import QWEN_GRIDS, qwen_patches
from tests.families.vision_agreement import special_ids

# A quarter of each head is not turned.
VISION = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": 14,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
SPARSE = {"index_n_heads": 2, "index_head_dim": 24, "index_block_size": 4, "index_topk_blocks": 3}
TEXT = (
    SIZES
    | rope(5e6, partial_rotary_factor=0.5)
    | EXPERTS
    | SPARSE
    | {
        "num_hidden_layers": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    }
)


def config(**vision: Any) -> MiniMaxM3VLConfig:
    ids = special_ids(TEXTS.reserved)
    return MiniMaxM3VLConfig(
        text_config=MiniMaxM3VLTextConfig(**TEXT),
        vision_config=VISION | vision,
        projector_hidden_size=56,
        image_token_index=ids[PLACE],
        video_token_index=ids[OTHER],
    )


TOWER = TowerFamily(
    with_211_rows(minimax_tower),
    config,
    {
        "plain": {},
        "no_merging": {"spatial_merge_size": 1, "layer_norm_eps": 1e-2, "num_attention_heads": 2},
    },
    qwen_patches,
    tower_references.qwen25vl,
    shapes=QWEN_GRIDS,
    grids=True,
    flavours=("llama.cpp",),
    refused=[
        ({"hidden_act": "quick_gelu"}, "llama.cpp", "`hidden_act` of the vision part is quick"),
        (
            {"rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}},
            "llama.cpp",
            "rotary base",
        ),
    ],
)
