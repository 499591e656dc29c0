"""Files with the tensor layouts of other converters or of earlier versions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError
from tests.families.agreement import check_long_prompt, load_decoder
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import changed, pair_of
from tests.gguf_files import matrices

FLAVOURS = pytest.mark.parametrize("flavour", ["llama.cpp", "ollama"])


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "tiny.gguf"


def check(path: Path, twin: Any, tensors: dict[str, Any], **keys: Any) -> None:
    """The file with changed tensors and keys agrees with `twin`."""
    check_long_prompt(pair_of(changed(path, keys, tensors), twin))


def merged_qkv(path: Path, layers: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    stored, tensors = matrices(path), {}
    for layer in range(layers):
        for kind in kinds:
            names = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate([stored[n] for n in names])
            tensors |= dict.fromkeys(names)
    return tensors


def test_llama_with_q_k_and_v_in_one_tensor_agrees(path) -> None:
    twin = TEXT_MODELS["llama"].write(path)
    check(path, twin, merged_qkv(path, 2, ("weight",)))


@pytest.mark.parametrize("family", ["chatglm", "phi2"])
def test_q_k_and_v_with_biases_in_one_tensor_agree(path, family) -> None:
    """As in the authors' checkpoints."""
    twin = TEXT_MODELS[family].write(path)
    check(path, twin, merged_qkv(path, 2, ("weight", "bias")))


@FLAVOURS
def test_gpt_oss_with_q_k_and_v_in_one_tensor_agrees(path, flavour) -> None:
    twin = TEXT_MODELS["gpt-oss"].write(path, flavour=flavour)
    check(path, twin, merged_qkv(path, 3, ("weight", "bias")))


@FLAVOURS
def test_gpt_oss_with_alternating_rows_of_gate_and_up_agrees(path, flavour) -> None:
    twin = TEXT_MODELS["gpt-oss"].write(path, flavour=flavour)
    stored, tensors = matrices(path), {}
    for layer in range(3):
        for kind in ("weight", "bias"):
            names = [f"blk.{layer}.ffn_{part}_exps.{kind}" for part in ("gate", "up")]
            rows = np.stack([stored[name] for name in names], axis=2)
            merged = rows.reshape(len(rows), -1, *rows.shape[3:])
            tensors[f"blk.{layer}.ffn_gate_up_exps.{kind}"] = merged
            tensors |= dict.fromkeys(names)
    check(path, twin, tensors)


def test_mixtral_with_a_tensor_for_each_expert_agrees(path) -> None:
    """As the first converters wrote them."""
    twin = TEXT_MODELS["mixtral"].write(path)
    tensors: dict[str, Any] = {}
    for name, array in matrices(path).items():
        if "_exps" in name:
            tensors[name] = None
            for expert, matrix in enumerate(array):
                tensors[name.replace("_exps", f".{expert}")] = matrix
    check(path, twin, tensors)


def test_qwen3next_with_the_inputs_of_each_key_head_together_agrees(path) -> None:
    """As the first converters wrote them."""
    twin = TEXT_MODELS["qwen3next"].write(path)
    tensors = {}
    for number, layer in enumerate(twin.model.layers):
        if layer.block_type == "linear_attention":
            tensors[f"blk.{number}.ssm_in.weight"] = layer.linear_attn.in_proj_qkvz.weight.numpy()
            tensors |= {f"blk.{number}.attn_{name}.weight": None for name in ("qkv", "gate")}
    check(path, twin, tensors)


def test_granite_with_the_norm_of_a_single_group_as_a_vector_agrees(path) -> None:
    """As llama.cpp writes quantised copies."""
    twin = TEXT_MODELS["granitehybrid"].write(path)
    norms = {name: rows for name, rows in matrices(path).items() if "ssm_norm" in name}
    assert len(norms) == 2
    check(path, twin, {name: rows.reshape(-1) for name, rows in norms.items()})


def test_ernie_with_the_bias_of_experts_as_a_row_agrees(path) -> None:
    """As in the authors' checkpoints, of which llama.cpp's converter keeps the shape."""
    twin = TEXT_MODELS["ernie4_5-moe"].write(path)
    biases = {name: row for name, row in matrices(path).items() if "exp_probs_b" in name}
    assert len(biases) == 3
    check(path, twin, {name: bias.reshape(1, -1) for name, bias in biases.items()})


def test_layers_for_drafting_tokens_are_ignored(path) -> None:
    twin = TEXT_MODELS["qwen3next"].write(path)
    last = {name: rows for name, rows in matrices(path).items() if name.startswith("blk.3.")}
    drafting = {name.replace("blk.3.", "blk.4."): rows for name, rows in last.items()}
    drafting["blk.4.nextn.eh_proj.weight"] = last["blk.3.attn_q.weight"]
    check(path, twin, drafting, block_count=5, nextn_predict_layers=1)
    assert len(load_decoder(path.with_name("changed.gguf")).cache_layers) == 4


@pytest.mark.parametrize(
    ("family", "config", "lists"),
    [
        ("glm4moe", "plain", {}),
        ("deepseek2", "v3", {}),
        ("glm4", "plain", {"feed_forward_length": 2}),
        ("bailingmoe2", "plain", {}),
        ("exaone4", "plain", {}),
        ("exaone-moe", "plain", {"attention.sliding_window_pattern": 4}),
        ("exaone4", "plain", {"attention.sliding_window_pattern": 4}),
    ],
)
def test_files_with_a_layer_for_drafting_tokens_agree(
    path, family: str, config: str, lists: dict[str, int]
) -> None:
    """lists: keys that list all layers, the last one too, and their usual number of entries."""
    twin = TEXT_MODELS[family].write(path, config)
    file = GGUFFile.open(path)
    count = int(file.metadata[f"{family}.block_count"])
    last, draft = f"blk.{count - 1}.", f"blk.{count}."
    stored = {name: rows for name, rows in matrices(path).items() if name.startswith(last)}
    drafting = {name.replace(last, draft): rows for name, rows in stored.items()}
    drafting[f"{draft}nextn.eh_proj.weight"] = stored[f"{last}attn_output.weight"]
    longer = {}
    for key, entries in lists.items():
        value = file.metadata[f"{family}.{key}"]
        longer[key] = np.resize(np.asarray(value), entries + 1).tolist()
    check(path, twin, drafting, block_count=count + 1, nextn_predict_layers=1, **longer)


def test_llama_with_values_narrower_than_keys_agrees(path) -> None:
    """The missing half of each value head is zero in the twin."""
    twin = TEXT_MODELS["llama"].write(path)
    heads, kv_heads, dim, kept = 4, 2, 16, 8
    tensors: dict[str, Any] = {}
    for block, layer in enumerate(twin.model.layers):
        attention, prefix = layer.self_attn, f"blk.{block}.attn"
        values = attention.v_proj.weight.view(kv_heads, dim, -1)
        values[:, kept:] = 0
        tensors[f"{prefix}_v.weight"] = values[:, :kept].flatten(0, 1).numpy()
        output = attention.o_proj.weight.view(-1, heads, dim)[:, :, :kept]
        tensors[f"{prefix}_output.weight"] = output.flatten(1).numpy()
    check(path, twin, tensors, **{"attention.value_length": kept})
    decoder = load_decoder(path.with_name("changed.gguf"))
    assert decoder.cache_layers[0].value_dim == kept


def test_llama_with_partly_rotated_heads_agrees(path) -> None:
    """The twin rotates the other pairs by an angle of zero."""
    twin = TEXT_MODELS["llama"].write(path)
    rotated, pairs = 8, 8
    frequencies = torch.zeros(pairs)
    frequencies[: rotated // 2] = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    twin.model.rotary_emb.inv_freq = frequencies
    check(path, twin, {}, **{"rope.dimension_count": rotated})


def test_gemma3_with_a_separate_head_agrees(path) -> None:
    twin = TEXT_MODELS["gemma3"].write(path)
    head = matrices(path)["token_embd.weight"][::-1].copy()
    twin.lm_head.weight = torch.nn.Parameter(torch.from_numpy(head), requires_grad=False)
    check(path, twin, {"output.weight": head})


def test_gemma3n_without_a_cap_of_logits_agrees(path) -> None:
    twin = TEXT_MODELS["gemma3n"].write(path, "another_cap_of_logits")
    twin.config.final_logit_softcapping = 1e6  # as good as none
    check(path, twin, {}, final_logit_softcapping=0.0)


def test_qwen2_without_any_bias_agrees(path) -> None:
    """As KORMo; a single missing one is still an error."""
    twin = TEXT_MODELS["qwen2"].write(path)
    biases = [name for name in matrices(path) if name.endswith(".bias")]
    with pytest.raises(ModelFileError, match=r"1 is missing \(blk.0.attn_q.bias\)"):
        check(path, twin, {"blk.0.attn_q.bias": None})
    with pytest.raises(ModelFileError, match="3 are missing"):
        check(path, twin, {name: None for name in biases if "blk.0." in name})
    for layer in twin.model.layers:
        for name in "qkv":
            getattr(layer.self_attn, f"{name}_proj").bias.zero_()
    check(path, twin, dict.fromkeys(biases))


def test_gemma3n_tokens_beyond_the_table_of_layer_inputs_have_its_first_row(path) -> None:
    twin, rows = TEXT_MODELS["gemma3n"].write(path), 100
    table = matrices(path)["per_layer_token_embd.weight"]
    twin.model.config.vocab_size_per_layer_input = rows
    check(path, twin, {"per_layer_token_embd.weight": table[:rows].copy()})


def test_gemma4_tokens_beyond_the_table_of_layer_inputs_have_its_first_row(path) -> None:
    twin, rows = TEXT_MODELS["gemma4"].write(path, "layer_inputs_and_shared_keys"), 100
    table = matrices(path)["per_layer_token_embd.weight"]
    twin.model.embed_tokens_per_layer.weight[rows:] = twin.model.embed_tokens_per_layer.weight[0]
    check(path, twin, {"per_layer_token_embd.weight": table[:rows].copy()})


def test_gemma4_with_separate_gates_and_ups_and_the_older_scale_of_experts_agrees(path) -> None:
    twin = TEXT_MODELS["gemma4"].write(path, "experts")
    stored, tensors = matrices(path), {}
    for layer in range(4):
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate_up", "gate", "up")]
        gate, up = np.split(stored[names[0]], 2, axis=1)
        tensors |= {names[0]: None, names[1]: gate.copy(), names[2]: up.copy()}
        scale = f"blk.{layer}.ffn_down_exps.scale"
        older = f"blk.{layer}.ffn_gate_inp.per_expert_scale"
        tensors |= {scale: None, older: stored[scale]}
    check(path, twin, tensors)


def test_gemma4_layers_that_share_keys_may_have_unused_ones(path) -> None:
    twin = TEXT_MODELS["gemma4"].write(path, "layer_inputs_and_shared_keys")
    unused = {"attn_k": (16, 64), "attn_v": (16, 64), "attn_k_norm": (8,)}
    tensors = {f"blk.2.{name}.weight": np.ones(size, "f4") for name, size in unused.items()}
    check(path, twin, tensors)


def test_gemma4_layers_without_a_scale_are_not_scaled(path) -> None:
    twin = TEXT_MODELS["gemma4"].write(path)
    tensors = {f"blk.{layer}.layer_output_scale.weight": None for layer in range(4)}
    with pytest.raises(AssertionError):
        check(path, twin, tensors)
    for layer in twin.model.layers:
        layer.layer_scalar.fill_(1.0)
    check(path, twin, tensors)
