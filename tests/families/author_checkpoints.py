"""Checkpoints of families for which `transformers` has no class: those of equal models, with the
names and settings of the families' authors."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# The names of GPT-2, which many families use: of modules, and of settings.
GPT2_MODULES = {"model": "transformer", "embed_tokens": "wte", "norm": "ln_f", "layers": "h"}
GPT2_NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
GPT2_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
QKV = ("q_proj", "k_proj", "v_proj")


def save_internlm2(model: Any, folder: Path) -> None:
    """A Llama as InternLM 2: each key head's queries, its key and its value are adjacent."""
    names = {
        "lm_head": "output",
        "embed_tokens": "tok_embeddings",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    settings = {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    tensors = _saved(model, folder, names, "InternLM2ForCausalLM", settings)
    size = model.config.head_dim
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        q, k, v = (
            tensors.pop(f"{prefix}.self_attn.{name}_proj.weight").unflatten(0, (-1, size))
            for name in "qkv"
        )
        groups = torch.cat([q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]], dim=1)
        tensors[f"{prefix}.attention.wqkv.weight"] = groups.flatten(0, 2).contiguous()
    save_file(tensors, folder / "model.safetensors")


def save_baichuan(model: Any, folder: Path) -> None:
    """A Llama as Baichuan 1, or as Baichuan 2, which divides the rows of the head by their lengths
    and has more tokens."""
    second = getattr(model.config, "generation", 2) == 2
    settings = {"vocab_size": 125696 if second else 64000}
    tensors = _saved(model, folder, {}, "BaichuanForCausalLM", settings)
    _join(tensors, "model.layers", "self_attn", QKV, "self_attn.W_pack")
    save_file(tensors, folder / "model.safetensors")
    if second:
        head = model.lm_head.weight
        head.copy_(torch.nn.functional.normalize(head))


def save_xverse(model: Any, folder: Path) -> None:
    """A Llama as XVERSE."""
    save_file(_saved(model, folder, {}, "XverseForCausalLM", {}), folder / "model.safetensors")


def save_pangu(model: Any, folder: Path) -> None:
    """A Llama with biases of attention as openPangu-Embedded."""
    tensors = _saved(model, folder, {}, "PanguEmbeddedForCausalLM", {"bias": True})
    save_file(tensors, folder / "model.safetensors")


def save_orion(model: Any, folder: Path) -> None:
    """A StableLM whose heads are rotated as a whole as Orion."""
    tensors = _saved(model, folder, {}, "OrionForCausalLM", {})
    save_file(tensors, folder / "model.safetensors")
    _respell(folder, layer_norm_eps="rms_norm_eps", use_parallel_residual=None)


def save_qwen(model: Any, folder: Path) -> None:
    """A Qwen 2 as Qwen 1."""
    names = {
        **GPT2_MODULES,
        **GPT2_NORMS,
        "self_attn": "attn",
        "o_proj": "c_proj",
        "gate_proj": "w2",
        "up_proj": "w1",
        "down_proj": "c_proj",
    }
    config = model.config
    settings = {
        "intermediate_size": 2 * config.intermediate_size,
        "kv_channels": config.hidden_size // config.num_attention_heads,
        "rotary_pct": 1.0,
    }
    tensors = _saved(model, folder, names, "QWenLMHeadModel", settings)
    _join(tensors, "transformer.h", "attn", QKV, "attn.c_attn")
    save_file(tensors, folder / "model.safetensors")
    _respell(
        folder,
        max_position_embeddings="seq_length",
        rms_norm_eps="layer_norm_epsilon",
        rope_theta="rotary_emb_base",
        num_key_value_heads=None,
    )


def save_maincoder(model: Any, folder: Path) -> None:
    """A Hunyuan as Maincoder, which rotates neighbouring elements of a head."""
    names = {"mlp": "feed_forward", "query_layernorm": "q_norm", "key_layernorm": "k_norm"}
    settings = {
        "intermediate_size_mlp": model.config.intermediate_size,
        "head_dim": model.config.head_dim,
        "use_qk_norm": True,
    }
    tensors = _saved(model, folder, names, "MaincoderForCausalLM", settings)
    tensors = {
        name: _neighboured(each, model.config.head_dim)
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"))
        else each
        for name, each in tensors.items()
    }
    save_file(tensors, folder / "model.safetensors")
    _respell(folder, intermediate_size=None)


def _neighboured(rows: Tensor, size: int) -> Tensor:
    """Rows or elements of heads, of which the first half is rotated with the second, as pairs of
    neighbours."""
    halves = rows.unflatten(0, (-1, 2, size // 2))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def save_codeshell(model: Any, folder: Path) -> None:
    """A StarCoder 2 as CodeShell."""
    names = {
        **GPT2_MODULES,
        **GPT2_NORMS,
        "self_attn": "attn",
        "o_proj": "c_proj",
    }
    tensors = _saved(
        model, folder, names, "CodeShellForCausalLM", {"position_embedding_type": "rope"}
    )
    _join(tensors, "transformer.h", "attn", QKV, "attn.c_attn")
    save_file(tensors, folder / "model.safetensors")
    _respell(
        folder,
        **GPT2_SIZES,
        intermediate_size="n_inner",
        num_key_value_heads="num_query_groups",
        norm_epsilon="layer_norm_epsilon",
        hidden_act="activation_function",
        sliding_window=None,
    )


def save_openelm(model: Any, folder: Path) -> None:
    """A Qwen 3 whose layers have sizes of their own as OpenELM."""
    names = {
        "model": "transformer",
        "embed_tokens": "token_embeddings",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "mlp": "ffn",
        "down_proj": "proj_2",
    }
    config = model.config
    settings = {
        "head_dim": config.head_dim,
        "share_input_output_layers": True,
    }
    tensors = _saved(model, folder, names, "OpenELMForCausalLM", settings)
    tensors.pop("lm_head.weight", None)
    _join(tensors, "transformer.layers", "attn", QKV, "attn.qkv_proj")
    _join(tensors, "transformer.layers", "ffn", ("gate_proj", "up_proj"), "ffn.proj_1")
    save_file(tensors, folder / "model.safetensors")
    _respell(
        folder,
        hidden_size="model_dim",
        num_hidden_layers="num_transformer_layers",
        max_position_embeddings="max_context_length",
        rope_theta="rope_freq_constant",
        num_attention_heads=None,
        num_key_value_heads=None,
        intermediate_size=None,
        layer_types=None,
        rms_norm_eps=None,
    )


def save_jais(model: Any, folder: Path) -> None:
    """A `falling_twins.Jais` as it is published, with transposed matrices."""
    settings = {
        "activation_function": "swiglu",
        "position_embedding_type": "alibi",
        "scale_qk_dot_by_d": True,
        "tie_word_embeddings": False,
    }
    tensors = _saved(model, folder, GPT2_MODULES, "JAISLMHeadModel", settings)
    for name in tensors:
        if name.endswith(".weight") and re.search(r"\.c_\w+\.", name):
            tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, folder / "model.safetensors")
    _respell(
        folder,
        **GPT2_SIZES,
        intermediate_size="n_inner",
        rms_norm_eps="layer_norm_epsilon",
        num_key_value_heads=None,
        rope_theta=None,
        hidden_act=None,
    )


def save_plm(model: Any, folder: Path) -> None:
    """A DeepSeek V3 with neither experts nor gates as PLM."""
    tensors = _saved(model, folder, {}, "PLMForCausalLM", {})
    save_file(tensors, folder / "model.safetensors")


def save_refact(model: Any, folder: Path) -> None:
    """A Llama without rotation and with one key head as Refact."""
    names = {
        **GPT2_MODULES,
        **GPT2_NORMS,
        "self_attn.q_proj": "attn.q",
        "self_attn.o_proj": "attn.c_proj",
        "down_proj": "c_proj",
    }
    tensors = _saved(model, folder, names, "GPTRefactForCausalLM", {"multi_query": True})
    _join(tensors, "transformer.h", "self_attn", ("k_proj", "v_proj"), "attn.kv")
    _join(tensors, "transformer.h", "mlp", ("gate_proj", "up_proj"), "mlp.gate_up_proj")
    tensors["ln_f.weight"] = tensors.pop("transformer.ln_f.weight")
    save_file(tensors, folder / "model.safetensors")
    _respell(
        folder,
        **GPT2_SIZES,
        rms_norm_eps="layer_norm_epsilon",
        num_key_value_heads=None,
        intermediate_size=None,
        rope_theta=None,
        hidden_act=None,
    )


def save_exaone(model: Any, folder: Path) -> None:
    """A Llama as EXAONE 3.5."""
    names = {
        **GPT2_MODULES,
        **GPT2_NORMS,
        "self_attn": "attn.attention",
        "o_proj": "out_proj",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
    }
    config = model.config
    settings = {
        "num_layers": config.num_hidden_layers,
        "layer_norm_epsilon": config.rms_norm_eps,
        "activation_function": "silu",
    }
    scaling = config.rope_parameters
    if scaling["rope_type"] != "default":
        settings["rope_scaling"] = {key: scaling[key] for key in scaling if key != "rope_theta"}
    tensors = _saved(model, folder, names, "ExaoneForCausalLM", settings)
    save_file(tensors, folder / "model.safetensors")
    _respell(folder, num_hidden_layers=None, rms_norm_eps=None, hidden_act=None)


def save_deepseek(model: Any, folder: Path) -> None:
    """A Qwen 2 MoE without biases as DeepSeek MoE: its gate of the shared expert becomes a half,
    which is a factor of the shared expert's output in the checkpoint."""
    gates = [
        layer.mlp.shared_expert_gate
        for layer in model.model.layers
        if hasattr(layer.mlp, "shared_expert_gate")
    ]
    for gate in gates:
        gate.weight.zero_()
    config = model.config
    shared = config.shared_expert_intermediate_size // config.moe_intermediate_size
    settings = {
        "first_k_dense_replace": len(config.mlp_only_layers),
        "n_routed_experts": config.num_experts,
        "n_shared_experts": shared,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "mlp_only_layers": None,
    }
    tensors = _saved(
        model, folder, {"shared_expert": "shared_experts"}, "DeepseekForCausalLM", settings
    )
    tensors = {name: each for name, each in tensors.items() if "shared_expert_gate" not in name}
    for name in tensors:
        if name.endswith("shared_experts.down_proj.weight"):
            tensors[name] *= 0.5
    save_file(tensors, folder / "model.safetensors")


def _saved(
    model: Any, folder: Path, names: Mapping[str, str], architecture: str, settings: Any
) -> dict[str, Tensor]:
    """Saves the model with other settings; returns its tensors, renamed, which are not saved."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config.pop("head_dim", None)
    config |= {"architectures": [architecture], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in names.items():
            name = re.sub(rf"(?<![^.]){re.escape(old)}(?=\.)", new, name)
        tensors[name] = tensor
    return tensors


def _join(
    tensors: dict[str, Tensor], layers: str, module: str, parts: Sequence[str], whole: str
) -> None:
    """Replaces the `parts` of a module of each layer, and their biases if there are any, by their
    concatenation along the rows."""
    first = re.compile(rf"({re.escape(layers)}\.\d+)\.{module}\.{parts[0]}\.(\w+)")
    for prefix, kind in [found.groups() for name in tensors if (found := first.fullmatch(name))]:
        rows = [tensors.pop(f"{prefix}.{module}.{part}.{kind}") for part in parts]
        tensors[f"{prefix}.{whole}.{kind}"] = torch.cat(rows)


def _respell(folder: Path, **names: str | None) -> None:
    """Renames these settings, or removes those without a new name."""
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    path.write_text(
        json.dumps({new: stored[key] for key in stored if (new := names.get(key, key)) is not None})
    )
