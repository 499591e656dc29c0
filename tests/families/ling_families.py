"""The row of Ling 2.0 in the table of text families.

`transformers` lacks it. It computes as GLM-4.5 with norms of heads, whose checkpoint is written as
one of Ling.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig

from tests.families.sigmoid_families import LEADING_DENSE
from tests.families.text_family import TIED, WIDE_HEADS, YARN, CompleteFile, TextFamily
from tests.tiny_models import save_pretrained

_MODULES = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "o_proj": "dense",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "e_score_correction_bias": "expert_bias",
}
_SETTINGS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_QUERIES = re.compile(r"(.*\.)q_proj\.weight")


def save_ling(model: Any, folder: Path) -> None:
    """Save GLM-4.5 as Ling 2.0."""
    save_pretrained(model, folder)
    stored = load_file(folder / "model.safetensors")
    for queries in filter(_QUERIES.fullmatch, list(stored)):
        parts = [stored.pop(queries.replace("q_proj", f"{name}_proj")) for name in "qkv"]
        stored[queries.replace("q_proj", "query_key_value")] = torch.cat(parts)
    renamed = {
        ".".join(_MODULES.get(part, part) for part in name.split(".")): value
        for name, value in stored.items()
    }
    save_file(renamed, folder / "model.safetensors")
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings = {_SETTINGS.get(name, name): value for name, value in settings.items()}
    rope = settings.pop("rope_parameters")
    settings |= {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe",
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        "score_function": "sigmoid",
    }
    path.write_text(json.dumps(settings))


FAMILIES: Mapping[str, TextFamily] = {
    "bailingmoe2": TextFamily(
        Glm4MoeConfig,
        LEADING_DENSE
        | {"head_dim": 16, "num_mtp_layers": 0, "use_qk_norm": True, "n_shared_experts": 1},
        {
            "plain": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
            "tied_without_groups": TIED | {"norm_topk_prob": False},
            "yarn": {"rope_parameters": YARN["rope_parameters"] | {"partial_rotary_factor": 0.5}},
        },
        wide=WIDE_HEADS | {"moe_intermediate_size": 256},
        effective_keys={"rope.dimension_count": 4, "expert_weights_norm": False},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length expert_gating_func
                    expert_weights_norm expert_weights_scale
                """
            ),
        ),
        options={"save": save_ling},
    ),
}
