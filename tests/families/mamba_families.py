"""The rows of models with Mamba or Mamba 2 layers in the table of text families."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import (
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
)

from tests.families.text_family import (
    SIZES,
    TIED,
    WIDE,
    CompleteFile,
    TextFamily,
    Variant,
    rope,
)

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
}
# Chunks of `transformers` are shorter than the prompts.
GRANITE_HYBRID = (
    SIZES
    | rope(10000.0)
    | MULTIPLIERS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    }
)
NEMOTRON_H = SIZES | {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 32,
    # Files have no limit, nor have the authors' models.
    "time_step_min": 1e-9,
}
NEMOTRON_EXPERTS = NEMOTRON_H | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
FALCON_H1 = (
    SIZES
    | rope(1e6)
    | {
        "head_dim": 32,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
        "mamba_norm_before_gate": False,
    }
)
FALCON_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.8, 1.7],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.1, 0.8, 1.3, 0.9],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
}
# Recurrent layers with and without experts, and attention with experts.
JAMBA = SIZES | {
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2}
OLLAMA_NAMES = {"ffn_latent_down": "ffn_latent_in", "ffn_latent_up": "ffn_latent_out"}


def named_by_ollama(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The matrices around experts with other names, and one of a layer for drafts."""
    renamed: dict[str, Any] = {
        "mtp.layers.0.mixer.experts.0.up_proj.weight": tensors["output_norm.weight"]
    }
    for name, matrix in tensors.items():
        layer, _, rest = name.partition(".ffn_latent")
        if rest:
            kind = f"ffn_latent{rest.removesuffix('.weight')}"
            renamed |= {name: None, f"{layer}.{OLLAMA_NAMES[kind]}.weight": matrix}
    return renamed


def widened(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The experts of the last layer with as many further columns, which add nothing."""
    up, down = "blk.3.ffn_up_exps.weight", "blk.3.ffn_down_exps.weight"
    return {
        up: np.concatenate([tensors[up], np.zeros_like(tensors[up])], axis=1),
        down: np.concatenate([tensors[down], np.zeros_like(tensors[down])], axis=2),
    }


def with_towers(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """One tensor of each model for images and sounds, and of the projectors."""
    names = "v.patch_embd.weight", "a.blk.0.attn_q.weight", "mm.1.weight", "mm.a.fc.weight"
    return dict.fromkeys(names, tensors["output_norm.weight"])


GRANITE_OPTIONAL_KEYS = """
    attention.key_length attention.value_length attention.scale embedding_scale logit_scale
    residual_scale rope.freq_base rope.scaling.finetuned
"""

FAMILIES: Mapping[str, TextFamily] = {
    "falcon-h1": TextFamily(
        FalconH1Config,
        FALCON_H1,
        {
            "plain": FALCON_MULTIPLIERS,
            "norms_of_groups": {"mamba_rms_norm": True, "mamba_n_groups": 2},
            "tied_without_convolution_bias": TIED
            | {"mamba_conv_bias": False, "mamba_d_conv": 7, "lm_head_multiplier": 1.0},
        },
        wide=WIDE | {"head_dim": 64, "mamba_d_ssm": 256, "mamba_n_heads": 4},
        files=(
            CompleteFile(
                "norms_of_groups",
                optional_tensors="blk.0.ssm_conv1d.bias blk.1.ssm_conv1d.bias",
            ),
        ),
    ),
    "granitehybrid": TextFamily(
        GraniteMoeHybridConfig,
        GRANITE_HYBRID,
        {
            "plain": {},
            "dense_with_rotation_and_groups": {
                "num_local_experts": 0,
                "position_embedding_type": "rope",
                "mamba_n_groups": 2,
                "mamba_d_conv": 7,
            },
            "attention_alone": {
                "num_hidden_layers": 2,
                "layer_types": ["full_attention"] * 2,
                "position_embedding_type": "rope",
            },
            "attention_last_tied": TIED
            | {
                "num_hidden_layers": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "mamba_conv_bias": False,
                "mamba_proj_bias": True,
            },
        },
        wide=WIDE | {"shared_intermediate_size": 256},
        effective_keys={"rope.scaling.finetuned": True},
        files=(
            CompleteFile(
                optional_keys=f"{GRANITE_OPTIONAL_KEYS} feed_forward_length",
                optional_tensors="blk.0.ssm_conv1d.bias blk.2.ssm_conv1d.bias",
            ),
        ),
    ),
    "jamba": TextFamily(
        JambaConfig,
        JAMBA,
        {
            "plain": {},
            "recurrent_last_layer_dense_tied": TIED
            | {
                "num_hidden_layers": 2,
                "attn_layer_period": 2,
                "attn_layer_offset": 0,
                "num_experts": 1,
                "num_experts_per_tok": 1,
                "mamba_d_conv": 7,
                "mamba_d_state": 24,
                "mamba_dt_rank": 5,
                "mamba_conv_bias": False,
                "mamba_proj_bias": True,
            },
        },
        files=(
            CompleteFile(
                optional_tensors=" ".join(f"blk.{n}.ssm_conv1d.bias" for n in (0, 2, 3)),
            ),
        ),
    ),
    "falcon-mamba": TextFamily(
        FalconMambaConfig,
        MAMBA,
        {"plain": {}},
        wide={"hidden_size": 256},
        files=(),
    ),
    "mamba": TextFamily(
        MambaConfig,
        MAMBA,
        {"plain": {}, "own_head_and_biases": {"tie_word_embeddings": False, "use_bias": True}},
        wide={"hidden_size": 256},
        files=(
            CompleteFile(
                optional_keys="attention.head_count feed_forward_length ssm.dt_b_c_rms",
                optional_tensors="blk.0.ssm_conv1d.bias blk.1.ssm_conv1d.bias",
            ),
        ),
    ),
    "mamba2": TextFamily(
        Mamba2Config,
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 2,
            "chunk_size": 32,
        },
        {
            "plain": {},
            "one_group_tied_without_biases": TIED | {"n_groups": 1, "use_conv_bias": False},
        },
        wide={"hidden_size": 256, "head_dim": 64},
        files=(
            CompleteFile(
                optional_keys="attention.head_count feed_forward_length",
                optional_tensors="blk.0.ssm_conv1d.bias blk.1.ssm_conv1d.bias",
            ),
        ),
    ),
    "nemotron_h": TextFamily(
        NemotronHConfig,
        NEMOTRON_H,
        {
            "plain": {},
            "recurrent_last_layer": {"layers_block_type": ["full_attention", "linear_attention"]},
            "one_group_attention_last": {
                "layers_block_type": ["mlp", "linear_attention", "full_attention"],
                "n_groups": 1,
                "use_conv_bias": False,
            },
        },
        wide=WIDE | {"head_dim": 64, "mamba_head_dim": 32},
        files=(
            CompleteFile(
                optional_keys="attention.layer_norm_epsilon",
                optional_tensors="blk.0.ssm_conv1d.bias blk.3.ssm_conv1d.bias",
            ),
        ),
    ),
    "nemotron_h_moe": TextFamily(
        NemotronHConfig,
        NEMOTRON_EXPERTS,
        {
            "plain": {},
            "latent_experts": {"moe_latent_size": 48},
            "groups_of_experts": {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        },
        variants={
            "ollama": Variant(
                keys={"moe_latent_size": None}, config="latent_experts", tensors=named_by_ollama
            ),
            "omni_of_ollama": Variant(architecture="nemotron_h_omni", tensors=with_towers),
            # As llama.cpp's converter writes Nemotron 3 Puzzle, whose layers differ.
            "sizes_of_each_layer": Variant(
                config="latent_experts",
                keys={
                    "feed_forward_length": [0, 32, 0, 64],
                    "expert_feed_forward_length": [0, 32, 0, 64],
                    "expert_used_count": [0, 3, 0, 3],
                },
                tensors=widened,
            ),
        },
        effective_keys={"expert_used_count": [0, 3, 0, 2]},
        refused=(({"expert_used_count": [0, 3, 0]}, "none for layer 3"),),
        wide=WIDE
        | {
            "head_dim": 64,
            "mamba_head_dim": 32,
            "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 256,
            "moe_latent_size": 256,
        },
        divided="latent_experts",
        files=(
            CompleteFile(
                optional_keys="""
                    attention.layer_norm_epsilon expert_feed_forward_length expert_group_count
                    expert_group_used_count expert_shared_count expert_weights_norm
                    expert_weights_scale
                """,
                optional_tensors="""
                    blk.0.ssm_conv1d.bias blk.1.exp_probs_b.bias blk.3.exp_probs_b.bias
                """,
            ),
            CompleteFile(
                "latent_experts",
                optional_keys="""
                    attention.layer_norm_epsilon expert_feed_forward_length expert_group_count
                    expert_group_used_count expert_shared_count expert_weights_norm
                    expert_weights_scale moe_latent_size
                """,
                optional_tensors="""
                    blk.0.ssm_conv1d.bias blk.1.exp_probs_b.bias blk.3.exp_probs_b.bias
                """,
            ),
        ),
    ),
}
