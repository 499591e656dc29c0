"""The rows of Ling in the table of text families.

`transformers` lacks it. Ling 1 computes as Granite with a shared expert and no multipliers, and
Ling 2.0 as GLM-4.5 with norms of heads; checkpoints of these are written as those of Ling.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, GraniteMoeSharedConfig

from tests.families.sigmoid_families import LEADING_DENSE
from tests.families.text_family import SIZES, TIED, WIDE_HEADS, YARN, CompleteFile, TextFamily, rope
from tests.tiny_models import save_pretrained

_MODULES = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "o_proj": "dense",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "e_score_correction_bias": "expert_bias",
}
_SHARED = "mlp.shared_experts"
# Of Granite: stored names, and those of the parts that a matrix becomes.
_PARTS = {
    "block_sparse_moe.input_linear": ("gate_proj", "up_proj"),
    "block_sparse_moe.output_linear": ("down_proj",),
    "shared_mlp.input_linear": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
    "shared_mlp.output_linear": (f"{_SHARED}.down_proj",),
    "block_sparse_moe.router.layer": ("mlp.gate",),
}
_SETTINGS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_local_experts": "num_experts",
}
_QUERIES = re.compile(r"(.*\.)q_proj\.weight")


def save_ling1(model: Any, folder: Path) -> None:
    """Save Granite with a shared expert as Ling 1."""
    save_pretrained(model, folder)
    renamed = {}
    for name, value in load_file(folder / "model.safetensors").items():
        root, _, place = name.removesuffix(".weight").partition(".layers.")
        number, _, module = place.partition(".")
        if module not in _PARTS:
            renamed[name] = value
            continue
        parts, prefix = _PARTS[module], f"{root}.layers.{number}"
        for part, rows in zip(parts, value.chunk(len(parts), dim=-2), strict=True):
            if rows.ndim == 2:
                renamed[f"{prefix}.{part}.weight"] = rows.contiguous()
                continue
            for expert, matrix in enumerate(rows):
                renamed[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = matrix.contiguous()
    write_ling(folder, renamed, architectures=["BailingMoeForCausalLM"], norm_topk_prob=True)


def save_ling2(model: Any, folder: Path) -> None:
    """Save GLM-4.5 as Ling 2.0."""
    save_pretrained(model, folder)
    stored = load_file(folder / "model.safetensors")
    architectures = ["BailingMoeV2ForCausalLM"]
    write_ling(folder, stored, architectures=architectures, score_function="sigmoid")


def write_ling(folder: Path, stored: dict[str, torch.Tensor], **changes: Any) -> None:
    """Names of attention as those of Ling, projections in one matrix, older names of settings."""
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
        "model_type": "bailing_moe",
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        **changes,
    }
    path.write_text(json.dumps(settings))


GRANITE = SIZES | {
    "head_dim": 16,
    "attention_multiplier": 0.25,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    # What Ling calls the width of experts and the number of shared ones.
    "shared_intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_shared_experts": 2,
}

FAMILIES: Mapping[str, TextFamily] = {
    "bailingmoe": TextFamily(
        GraniteMoeSharedConfig,
        GRANITE | rope(6e5),
        {"plain": {}, "tied_with_one_key_head": TIED | {"num_key_value_heads": 1}},
        wide={
            "hidden_size": 256,
            "head_dim": 64,
            "attention_multiplier": 0.125,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "shared_intermediate_size": 512,
        },
        effective_keys={"expert_weights_norm": False},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length expert_weights_norm
                    feed_forward_length leading_dense_block_count
                """
            ),
        ),
        options={"save": save_ling1},
    ),
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
        options={"save": save_ling2},
    ),
}
