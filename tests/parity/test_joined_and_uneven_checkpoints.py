"""Checkpoints of MiMo-V2.5 (joined queries, keys and values) and Nemotron 3 Puzzle (sizes per
layer) convert to models that agree with `transformers`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from tests.families.agreement import check_long_prompt
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import pair_of
from tests.tiny_models import write_tiny_folder
from tests.unit.model_zoo.convert.checkpoint_changes import copy, reshaped, settings
from tests.unit.model_zoo.convert.test_scaled_weights import rounded

PARTS = 2


def joined(weights: dict[str, Tensor], eight_bits: bool) -> dict[str, Tensor]:
    """Joins queries, keys and values in parts, as the authors store them, optionally in 8-bit
    blocks that end with each part. Returns the separate weights that they represent."""
    meant = {}
    for layer in range(3):
        names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        parts = [weights.pop(name) for name in names]
        halves = [
            torch.cat(own) for own in zip(*(part.chunk(PARTS) for part in parts), strict=True)
        ]
        whole = f"model.layers.{layer}.self_attn.qkv_proj.weight"
        if eight_bits:
            small, scales, halves = zip(*(rounded(half, 40, 24) for half in halves), strict=True)
            weights[whole] = torch.cat(small)
            weights[f"{whole}_scale_inv"] = torch.cat(scales)
        else:
            weights[whole] = torch.cat(halves)
        sizes = [len(part) // PARTS for part in parts]
        own = zip(*(half.split(sizes) for half in halves), strict=True)
        meant |= {name: torch.cat(part) for name, part in zip(names, own, strict=True)}
    return meant


@pytest.mark.parametrize("eight_bits", [False, True])
def test_joined_queries_keys_and_values_of_mimo2(eight_bits, tmp_path) -> None:
    folder, path = tmp_path / "Tiny-MiMo", tmp_path / "tiny.gguf"
    write_tiny_folder(folder, TEXT_MODELS["mimo2"].config(num_key_value_heads=PARTS))
    separate = copy(folder, tmp_path / "separate" / folder.name)
    meant: dict[str, Tensor] = {}
    reshaped(folder, lambda weights: meant.update(joined(weights, eight_bits)))
    tower = {"visual.blocks.0.norm1.weight": torch.ones(8)}
    reshaped(folder, lambda weights: weights.update(tower))
    reshaped(separate, lambda weights: weights.update(meant))
    changes: dict[str, Any] = {"attention_projection_layout": "fused_qkv"}
    if eight_bits:
        method = {"quant_method": "fp8", "weight_block_size": [40, 24]}
        changes["quantization_config"] = method
    settings(folder, architectures=["MiMoV2ForCausalLM"], model_type="mimo_v2", **changes)
    convert(folder, path, type="f32")
    convert(separate, tmp_path / "expected.gguf", type="f32")
    assert path.read_bytes() == (tmp_path / "expected.gguf").read_bytes()


def test_sizes_of_each_layer_of_nemotron_puzzle(tmp_path) -> None:
    """Gives the last layer's experts as many additional columns, which contribute nothing."""
    folder, path = tmp_path / "folder", tmp_path / "tiny.gguf"
    twin = write_tiny_folder(folder, TEXT_MODELS["nemotron_h_moe"].config("latent_experts"))

    def widen(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if ".3.mixer.experts." in name]:
            rows = "up_proj" in name
            weights[name] = torch.cat(
                [weights[name], torch.zeros_like(weights[name])], 0 if rows else 1
            )

    reshaped(folder, widen)
    blocks = [
        {"block_type": "mamba"},
        {"block_type": "moe", "moe_intermediate_size": 32, "num_experts_per_tok": 3},
        {"block_type": "attention"},
        {"block_type": "moe", "moe_intermediate_size": 64, "num_experts_per_tok": 3},
    ]
    changes = {"moe_intermediate_size": None, "num_experts_per_tok": None, "block_configs": blocks}
    settings(folder, architectures=["NemotronHPuzzleForCausalLM"], **changes)
    convert(folder, path, type="f32")
    stated = GGUFFile.open(path).metadata
    for key in ("feed_forward_length", "expert_feed_forward_length"):
        assert list(stated[f"nemotron_h_moe.{key}"]) == [0, 32, 0, 64]
    assert list(stated["nemotron_h_moe.expert_used_count"]) == [0, 3, 0, 3]
    check_long_prompt(pair_of(path, twin))
