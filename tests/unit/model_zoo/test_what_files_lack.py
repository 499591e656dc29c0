"""Every architecture, of files from which one thing is missing or in which one contradicts.

Each key and each tensor is left out by itself, and each tensor gets other shapes: loading fails and
names it, unless the tables below say what stands in for it.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from model_zoo.families import TEXT_FAMILIES
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.registry import class_for
from runtime.errors import ModelFileError
from tests.parity import (
    image_rows,
    test_command_r,
    test_encoders,
    test_gemma2,
    test_gemma3,
    test_gemma3n,
    test_gemma4,
    test_glm4,
    test_gptoss,
    test_granite,
    test_llama,
    test_llama4,
    test_mistral3,
    test_mixtral,
    test_olmo2,
    test_phi3,
    test_qwen2,
    test_qwen3,
    test_qwen3moe,
    test_qwen3next,
    test_qwen25vl,
    test_qwen35,
)
from tests.tiny_models import write_tiny

ENCODER = {"maker": AutoModel}
CASES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "bert": (test_encoders.CONFIGS["bert"], ENCODER),
    "command-r": (test_command_r.CONFIGS["biases"], {}),
    "gemma2": (test_gemma2.CONFIGS["plain"], {}),
    "gemma3": (test_gemma3.CONFIGS["plain"], {}),
    "gemma3 of Ollama": (test_gemma3.CONFIGS["plain"], {"flavour": "ollama"}),
    "gemma3n": (test_gemma3n.CONFIGS["plain"], {}),
    "gemma4": (test_gemma4.CONFIGS["dense"], {}),
    "gemma4 with experts": (test_gemma4.CONFIGS["all_at_once"], {}),
    "glm4": (test_glm4.CONFIGS["plain"], {}),
    "gpt-oss": (test_gptoss.CONFIGS["plain"], {}),
    "gptoss": (test_gptoss.CONFIGS["plain"], {"flavour": "ollama"}),
    "granite": (test_granite.CONFIGS["dense"], {}),
    "granitemoe": (test_granite.CONFIGS["experts"], {}),
    "llama": (test_llama.RELATIVES["nemo"], {}),
    "llama with experts": (test_mixtral.CONFIGS["plain"], {}),
    "llama4": (test_llama4.CONFIGS["experts_in_every_other_layer"], {}),
    "mistral3": (test_mistral3.CONFIGS["temperature"], {}),
    "mllama": (image_rows.tiny_config(), image_rows.OPTIONS),
    "nomic-bert": (test_encoders.CONFIGS["nomic_bert"], ENCODER),
    "olmo2": (test_olmo2.CONFIGS["plain"], {}),
    "phi3": (test_phi3.CONFIGS["plain"], {}),
    "phi3 of long contexts": (test_phi3.LONG, {}),
    "qwen2": (test_qwen2.CONFIGS["plain"], {}),
    "qwen2vl": (test_qwen25vl.CONFIGS["plain"], {}),
    "qwen3": (test_qwen3.CONFIGS["yarn"], {}),
    "qwen35": (test_qwen35.CONFIGS["dense"], {}),
    "qwen35moe": (test_qwen35.CONFIGS["experts"], {}),
    "qwen3moe": (test_qwen3moe.CONFIGS["plain"], {}),
    "qwen3next": (test_qwen3next.CONFIGS["plain"], {}),
}
EPSILON, BASE = "attention.layer_norm_rms_epsilon", "rope.freq_base"
LAYER_EPSILON, WINDOW = "attention.layer_norm_epsilon", "attention.sliding_window"
ORIGINAL, SHARED = "rope.scaling.original_context_length", "expert_shared_feed_forward_length"
HEADS = {"attention.key_length", "attention.value_length"}
MULTIPLIERS = {"attention.scale", "embedding_scale", "logit_scale", "residual_scale"}
YARN = {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}
GEMMA4 = {
    EPSILON, BASE, "rope.freq_base_swa", "rope.dimension_count_swa", "attention.value_length_swa",
    "final_logit_softcapping",
}  # fmt: skip
# Keys that nothing needs, or for which the family or the other keys have a value.
DEFAULTS: Mapping[str, set[str]] = {
    "bert": {"attention.causal", LAYER_EPSILON},
    "command-r": {*HEADS, LAYER_EPSILON, "logit_scale"},
    "gemma2": {
        BASE, WINDOW, "attn_logit_softcapping", "final_logit_softcapping",
    },
    "gemma3": {EPSILON, BASE, WINDOW, "rope.freq_base_swa"},
    "gemma3 of Ollama": {EPSILON, WINDOW, "rope.global.freq_base", "rope.local.freq_base"},
    "gemma3n": {
        EPSILON, BASE, "rope.freq_base_swa", "attention.sliding_window_pattern",
        "altup.active_idx", "altup.num_inputs", "altup.correct_scale", "final_logit_softcapping",
    },
    "gemma4": GEMMA4 | {"attention.shared_kv_layers", "embedding_length_per_layer_input"},
    "gemma4 with experts": GEMMA4 | {"expert_feed_forward_length"},
    "glm4": set(),
    "gpt-oss": {
        EPSILON, BASE, ORIGINAL, *YARN, "rope.scaling.type", WINDOW, "feed_forward_length",
        "expert_feed_forward_length",
    },
    "gptoss": {
        EPSILON, BASE, ORIGINAL, *YARN, "rope.scaling.type", WINDOW, "feed_forward_length",
        "expert_feed_forward_length",
    },
    "granite": {*HEADS, *MULTIPLIERS},
    "granitemoe": {*HEADS, *MULTIPLIERS},
    "llama": {BASE, EPSILON},
    "llama with experts": {BASE, EPSILON, *HEADS},
    "llama4": {
        *HEADS, BASE, "no_rope_interval", "use_qk_norm", "attention.head_dim",
        "attention.chunk_size", "attention.temperature_tuning", "attention.scale",
        "attention.floor_scale",
    },
    "mistral3": {
        *YARN, ORIGINAL, "rope.scaling.mscale", "rope.scaling.yarn_log_multiplier",
        "attention.temperature_scale",
    },
    "mllama": {EPSILON, BASE, *HEADS},
    "nomic-bert": {"attention.causal", LAYER_EPSILON, BASE},
    "olmo2": HEADS,
    "phi3": {BASE, *HEADS},
    "phi3 of long contexts": {BASE, *HEADS, "rope.scaling.attn_factor"},
    "qwen2": HEADS,
    "qwen2vl": {BASE, *HEADS},
    "qwen3": {ORIGINAL},
    "qwen35": {"full_attention_interval", "rope.dimension_sections"},
    "qwen35moe": {
        "full_attention_interval", "rope.dimension_sections", "expert_feed_forward_length", SHARED,
    },
    "qwen3next": {
        "full_attention_interval", "feed_forward_length", "expert_feed_forward_length",
        "expert_weights_norm", SHARED,
    },
    "qwen3moe": {
        "feed_forward_length", "expert_feed_forward_length", "expert_weights_norm",
        "norm_top_k_prob",
    },
}  # fmt: skip
# Keys whose value, where the file has none, the tensors or other keys contradict.
TOLD_BY_OTHERS = {
    *HEADS, "attention.head_count_kv", "attention.key_length_swa", "attention.shared_kv_layers",
    "attention.sliding_window_pattern", "embedding_length_per_layer_input", "expert_count",
    "interleave_moe_layer_step", "rope.dimension_sections",
}  # fmt: skip
EVERYWHERE = {"vocab_size", "rope.dimension_count"}
# Without them the head is the embedding, rotation is plain, and keys are values as well.
OPTIONAL_TENSORS = {"output.weight", "rope_freqs.weight"}
KEYS_AS_VALUES = {"gemma4 with experts": {"blk.1.attn_v.weight"}}
# May be a matrix of one row.
ONE_ROW = "ffn_gate_inp_shexp"
# Their files hold eyes as well, and their text models are built as others are.
SEEING = {"qwen25vl", "qwen3vl", "qwen3vlmoe"}
# What is told of instead where a name with an alternative is left out.
INSTEAD = {
    "attn_qkv": "attn_q",
    "ssm_ba": "ssm_beta",
    "attn_out.": "attn_output.",
    "ffn_gate_up_exps": "ffn_gate_exps",
    "ffn_gate_inp.weight": "ffn_down_exps.weight",  # a layer without router is dense
    "ffn_norm": "post_attention_norm",
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Callable[[str], GGUFFile]:
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(case: str) -> GGUFFile:
        if case not in made:
            config, options = CASES[case]
            path: Path = folder / f"{case}.gguf"
            write_tiny(path, config, **options)
            made[case] = GGUFFile.open(path)
        return made[case]

    return get


def refusal(file: GGUFFile, **changes: Any) -> str | None:
    """How it is refused once changed so, before any data is read; None where it is not."""
    changed = copy.copy(file)
    for name, value in changes.items():
        setattr(changed, name, value)
    metadata = Metadata(changed.metadata, path=changed.path)
    scope = TensorScope(changed, device=META, dtype=torch.float32)
    try:
        class_for(metadata)(scope, metadata)
        scope.check()
    except ModelFileError as error:
        return str(error)
    return None


def without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def named(tensor: str, message: str) -> bool:
    if tensor in message:
        return True
    others = (tensor.replace(name, other) for name, other in INSTEAD.items() if name in tensor)
    return any(other in message for other in others)


def test_every_architecture_is_tested() -> None:
    assert {case.partition(" ")[0] for case in CASES} == set(TEXT_FAMILIES) - SEEING


@every_case
def test_a_missing_key_is_told_unless_its_default_is_known(opened, case) -> None:
    file = opened(case)
    assert refusal(file) is None
    prefix = file.metadata["general.architecture"] + "."
    silent = set()
    for key in file.metadata:
        if key.startswith(prefix):
            message = refusal(file, metadata=without(file.metadata, key))
            if message is None:
                silent.add(key.removeprefix(prefix))
            elif key.removeprefix(prefix) not in TOLD_BY_OTHERS:
                assert f"`{key}` is missing" in message, (key, message)
    assert silent - EVERYWHERE == DEFAULTS[case]


@every_case
def test_a_missing_tensor_is_named(opened, case) -> None:
    file = opened(case)
    silent = set()
    for name in file.tensors:
        message = refusal(file, tensors=without(file.tensors, name))
        if message is None:
            silent.add(name)
        else:
            assert named(name, message), (name, message)
    assert silent <= OPTIONAL_TENSORS | KEYS_AS_VALUES.get(case, set())


@every_case
def test_a_tensor_that_no_layer_knows_is_named(opened, case) -> None:
    file = opened(case)
    name, other = "blk.0.attn_magic.weight", next(iter(file.tensors.values()))
    message = refusal(file, tensors={**file.tensors, name: replace(other, name=name)})
    assert message is not None
    assert f"1 is not known to this architecture ({name})" in message


@every_case
def test_a_tensor_of_another_shape_is_named(opened, case) -> None:
    file = opened(case)
    for name, info in file.tensors.items():
        first, last = info.shape[0], info.shape[-1]
        shapes = {(*info.shape[:-1], last // 2)}
        if ONE_ROW not in name:
            shapes.add((1, *info.shape))
        if name not in ("token_embd.weight", "per_layer_token_embd.weight"):  # for any vocabulary
            shapes.add((first // 2, *info.shape[1:]))
        for shape in shapes - {info.shape}:
            message = refusal(file, tensors={**file.tensors, name: replace(info, shape=shape)})
            assert message is not None, f"{name} {info.shape} may be {shape}"
            stem = name.rpartition(".")[0]
            assert stem in message or "laurel" in stem, (name, shape, message)
