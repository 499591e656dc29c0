"""LoRA adapters as GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from tests.gguf_files import finish

# GGUF names by those of `transformers`; `token_embd` has its first matrix transposed.
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]


def write_adapter(
    path: Path,
    pairs: Pairs,
    *,
    architecture: str = "llama",
    alpha: float | None = None,
    kind: str = "F32",
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """`pairs`: of tensors by name, such as `blk.0.attn_q.weight`: (rank, in) and (out, rank)."""
    tensors = {
        f"{name}.lora_{side}": array
        for name, pair in pairs.items()
        for side, array in zip("ab", pair, strict=True)
    }
    return write_tensors(
        path, tensors, architecture=architecture, alpha=alpha, kind=kind, keys=keys
    )


def write_tensors(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    alpha: float | None = None,
    kind: str = "F32",
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """`kind`: type of the tensors whose rows are multiples of its blocks, else F32. `keys`: texts,
    which replace those of an adapter, or None to remove them."""
    stated = {"general.type": "adapter", "adapter.type": "lora"} | dict(keys or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in stated.items():
        if value is not None:
            writer.add_string(key, value)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, array in tensors.items():
        data, type_ = _blocks(array, kind)
        writer.add_tensor(name, data, raw_dtype=type_)
    finish(writer)
    return path


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """As a file with tensors of that type has it."""
    return gguf.quants.dequantize(*_blocks(array, kind))


def random_pairs(
    shapes: Mapping[str, tuple[int, ...]], rank: int, *, seed: int = 0, size: float = 0.3
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For matrices (out, in), or (experts, out, in), by name."""
    random = np.random.default_rng(seed)
    return {
        name: (
            random.normal(0, size, (*shape[:-2], rank, shape[-1])).astype(np.float32),
            random.normal(0, size, (*shape[:-2], shape[-2], rank)).astype(np.float32),
        )
        for name, shape in shapes.items()
    }


def peft_pairs(model: Any, adapter: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The pairs of a `peft` model's adapter under the names of GGUF."""
    pairs = {}
    for name, module in model.base_model.model.named_modules():
        if adapter in getattr(module, "lora_A", ()):
            down, up = (getattr(module, side)[adapter].weight for side in ("lora_A", "lora_B"))
            pairs[_gguf_name(name)] = (_array(down), _rotated(_array(up), name, model.config))
        elif adapter in getattr(module, "lora_embedding_A", ()):
            down, up = (getattr(module, f"lora_embedding_{s}")[adapter] for s in "AB")
            pairs["token_embd.weight"] = (_array(down).T, _array(up))
    return pairs


def _gguf_name(name: str) -> str:
    if name.endswith("lm_head"):
        return "output.weight"
    layer, _, inner = name.partition("layers.")[2].partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.weight"


def _blocks(array: np.ndarray, kind: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    type_ = GGMLQuantizationType[kind]
    if array.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0]:
        type_ = GGMLQuantizationType.F32
    return gguf.quants.quantize(np.ascontiguousarray(array, np.float32), type_), type_


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().float().numpy()


def _rotated(up: np.ndarray, name: str, config: Any) -> np.ndarray:
    """Rows in the order of the model's rotary pairs: `permute` of llama.cpp's converter."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.rpartition(".")[2])
    if config.model_type != "llama" or count is None:
        return up
    halves = up.reshape(count, 2, up.shape[0] // count // 2, up.shape[1])
    return halves.swapaxes(1, 2).reshape(up.shape)
