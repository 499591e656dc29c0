"""Finds the forms of a checkpoint's weights by its `quantization_config`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.float_forms import mxfp4_form, nvfp4_form, scaled_form
from model_zoo.convert.integer_forms import awq_form, gptq_form, packed_form
from model_zoo.convert.scaled_weights import Block
from model_zoo.convert.weight_forms import WeightForm
from runtime.errors import UnsupportedModelError

Settings = Mapping[str, Any]
_BITS = (2, 4, 8)
# The Model Optimizer's settings; later versions also write them to config.json.
_MODEL_OPTIMIZER_FILE = "hf_quant_config.json"
_COMPRESSED_FORMATS = frozenset(
    "dense int-quantized float-quantized naive-quantized pack-quantized nvfp4-pack-quantized "
    "mxfp4-pack-quantized mxfp8-quantized mixed-precision".split()
)
# Suffixes of scales with which other programs quantise the inputs of products, or caches.
_UNUSED = (
    ".activation_scale",
    "_activation_scale",
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)


@dataclass(frozen=True, slots=True)
class StoredForms:
    """The forms of a checkpoint's weights, and the suffixes of tensors to ignore."""

    forms: Sequence[WeightForm]
    unused: tuple[str, ...] = ()


def stored_forms(config: Configuration) -> StoredForms:
    """The forms of a checkpoint's weights. None are needed for gpt-oss' MXFP4, whose blocks GGUF
    has, and for BitNet before its weights are rounded. Raises UnsupportedModelError for unknown
    methods."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        stated = {}
    method = stated.get("quant_method")
    if method is None and (config.path.parent / _MODEL_OPTIMIZER_FILE).exists():
        method = "modelopt"
    if method == "bitnet" and stated.get("quantization_mode") == "online":
        method = None
    read = _METHODS.get(method)
    if read is None:
        known = ", ".join(name for name in _METHODS if name is not None)
        raise UnsupportedModelError(
            f"{config.path}: its weights are quantised ({method}); {known} can be converted. "
            "Convert the original checkpoint instead."
        )
    return config.derived("quantization_config", lambda c: read(c, stated))


def _scaled(config: Configuration, stated: Settings) -> StoredForms:
    """Joined queries, keys and values may be stored in one part per key head, as for several
    devices."""
    block = _block(config, "weight_block_size", stated.get("weight_block_size"))
    forms = _of_modules(block)
    if config.get("attention_projection_layout") != "fused_qkv":
        return forms
    parts = config.require_size("num_key_value_heads")
    joined = scaled_form("_scale_inv", block, end=".qkv_proj.weight", parts=parts)
    return replace(forms, forms=(joined, *forms.forms))


def _compressed(config: Configuration, stated: Settings) -> StoredForms:
    """compressed-tensors. The parts of each matrix show which of its forms it has."""
    groups = list((stated.get("config_groups") or {}).values())
    formats = {part.get("format") for part in (stated, *groups)} - {None}
    others = sorted(map(str, formats - _COMPRESSED_FORMATS))
    sparse = (stated.get("sparsity_config") or {}).get("format", "dense")
    others += [] if sparse == "dense" else [str(sparse)]
    if (stated.get("transform_config") or {}).get("config_groups"):
        others.append("transforms")
    if others:
        raise UnsupportedModelError(
            f"{config.path}: its weights are compressed with {', '.join(others)}, which cannot be "
            "converted; convert the original checkpoint instead."
        )
    blocks = [(group.get("weights") or {}).get("block_structure") for group in groups]
    blocks = [block for block in blocks if block is not None]
    if any(block != blocks[0] for block in blocks):
        raise config.error("has several `block_structure`s, of which only one can be converted")
    return _of_modules(_block(config, "block_structure", blocks[0] if blocks else None))


def _model_optimizer(config: Configuration, stated: Settings) -> StoredForms:
    return _of_modules(None)


def _of_modules(block: Block | None) -> StoredForms:
    """All forms whose parts have the weight's name and a suffix."""
    return StoredForms(
        (
            scaled_form("_scale_inv", block),
            scaled_form("_scale", block),
            *(packed_form(bits) for bits in _BITS),
            nvfp4_form("_packed", "_global_scale", divides=True),
            nvfp4_form("", "_scale_2"),
            mxfp4_form("_packed"),
            mxfp4_form(""),
        ),
        _UNUSED,
    )


def _gptq(config: Configuration, stated: Settings) -> StoredForms:
    """The first version stores zero points minus one."""
    bits, version = stated["bits"], stated.get("checkpoint_format") or "gptq"
    if bits not in _BITS or version not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"{config.path}: its weights have {bits} bits in the format {version}; "
            f"{', '.join(map(str, _BITS))} in gptq and gptq_v2 can be converted."
        )
    return StoredForms((gptq_form(bits, zero_offset=int(version == "gptq")),))


def _awq(config: Configuration, stated: Settings) -> StoredForms:
    bits, version = stated.get("bits", 4), str(stated.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UnsupportedModelError(
            f"{config.path}: its weights have {bits} bits in the format {version}; 4 in gemm can "
            "be converted."
        )
    return StoredForms((awq_form(),))


def _without_method(config: Configuration, stated: Settings) -> StoredForms:
    return StoredForms((scaled_form("_scale_inv", None),))


_METHODS: Mapping[str | None, Callable[[Configuration, Settings], StoredForms]] = {
    None: _without_method,
    "mxfp4": _without_method,
    "fp8": _scaled,
    "fbgemm_fp8": _scaled,
    "compressed-tensors": _compressed,
    "modelopt": _model_optimizer,
    "gptq": _gptq,
    "awq": _awq,
}


def _block(config: Configuration, key: str, stated: object) -> Block | None:
    """Rows and columns of the blocks that share a scale; None if the settings state none."""
    if stated is None:
        return None
    if not isinstance(stated, list) or len(stated) != 2 or not all(map(_is_size, stated)):
        raise config.error(f"has {str(stated)[:80]} as `{key}`, not two sizes")
    return stated[0], stated[1]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
