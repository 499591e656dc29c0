"""Quantised checkpoints are converted to the weights that they represent."""

import json
import re
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from model_zoo.convert.checkpoint_reader import open_checkpoint
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.convert_folder import convert
from model_zoo.convert.quantization_methods import stored_forms
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.families.agreement import load_decoder
from tests.gguf_files import Reader, matrices
from tests.tiny_models import write_tiny_folder
from tests.unit.model_zoo.convert import quantised_weights as forms
from tests.unit.model_zoo.convert.checkpoint_changes import SIZES, copy, reshaped, settings

PUBLISHED = Path(__file__).parent / "compressed_tensors.safetensors"


def compressed(format: str, **weights: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


MODEL_OPTIMIZER = {"quant_method": "modelopt"}
INT8, FLOAT8 = compressed("int-quantized"), compressed("float-quantized")
PACKED, NVFP4 = compressed("pack-quantized"), compressed("nvfp4-pack-quantized")
GPTQ = {"quant_method": "gptq", "bits": 4}
# Ways of storing weights, and their configurations.
METHODS = {
    "float8_whole": (forms.float8_whole, FLOAT8),
    "float8_rows": (forms.float8_rows, FLOAT8),
    "float8_whole_of_autofp8": (forms.float8_whole, {"quant_method": "fp8"}),
    "float8_rows_of_fbgemm": (forms.float8_rows, {"quant_method": "fbgemm_fp8"}),
    "float8_whole_of_model_optimizer": (forms.float8_whole, MODEL_OPTIMIZER),
    "float8_rows_of_model_optimizer": (forms.float8_rows_of_model_optimizer, MODEL_OPTIMIZER),
    "float8_exponents": (forms.float8_exponents, compressed("mxfp8-quantized")),
    "int8_rows": (forms.int8_rows, INT8),
    "int8_zero_points": (partial(forms.int8_zero_points, columns=96), INT8),
    "int8_zero_points_of_groups": (partial(forms.int8_zero_points, columns=32), INT8),
    "int4": (partial(forms.packed, bits=4, columns=32), PACKED),
    "int4_zero_points": (partial(forms.packed, bits=4, columns=8, zero_points=True), PACKED),
    "int4_in_activation_order": (forms.packed_in_activation_order, PACKED),
    "int4_without_order": (forms.packed_without_order, PACKED),
    "int8_packed": (partial(forms.packed, bits=8, columns=96), PACKED),
    "nvfp4": (forms.nvfp4, NVFP4),
    "nvfp4_of_model_optimizer": (forms.nvfp4_of_model_optimizer, MODEL_OPTIMIZER),
    "mxfp4": (forms.mxfp4, compressed("mxfp4-pack-quantized")),
    "gptq": (partial(forms.gptq, bits=4), GPTQ),
    "gptq_8": (partial(forms.gptq, bits=8), GPTQ | {"bits": 8}),
    "gptq_positive": (lambda weight: forms.gptq(weight.abs(), bits=4), GPTQ),
    "gptq_in_activation_order": (partial(forms.gptq, bits=4, ordered=False), GPTQ),
    "gptq_2": (partial(forms.gptq, bits=4, less=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq_symmetric": (partial(forms.gptq, bits=4, zero_points=False), GPTQ),
    "awq": (forms.awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
}


def quantise(folder: Path, method: str) -> dict[str, Tensor]:
    """Quantises the weights of a folder's feed-forwards and keys; returns what they represent."""
    store, configuration = METHODS[method]
    meant: dict[str, Tensor] = {}

    def change(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if re.search(r"mlp.*_proj|k_proj", name)]:
            parts, meant[name] = store(weights.pop(name))
            module = name.removesuffix(".weight")
            for end, part in parts.items():
                whole = f"{name}{end}" if end[:1] in ("", "_") else f"{module}.{end.lstrip('.')}"
                weights[whole] = part
        weights["model.layers.0.self_attn.k_scale"] = torch.ones(1)

    reshaped(folder, change)
    if configuration["quant_method"] in ("gptq", "awq"):
        reshaped(folder, lambda weights: weights.pop("model.layers.0.self_attn.k_scale"))
    settings(folder, quantization_config=configuration)
    return meant


@pytest.mark.parametrize("method", METHODS)
def test_quantised_weights_are_those_that_are_meant(method, copied, tmp_path) -> None:
    expected = copy(copied, tmp_path / "expected" / copied.name)
    meant = quantise(copied, method)
    reshaped(expected, lambda weights: weights.update(meant))
    for folder, name in ((expected, "expected.gguf"), (copied, "found.gguf")):
        convert(folder, tmp_path / name, type="f32")
    found, wanted = (tmp_path / f"{name}.gguf" for name in ("found", "expected"))
    assert found.read_bytes() == wanted.read_bytes()


# The settings of the fixtures, which compressed-tensors 0.20.1 compressed and decompressed.
BLOCKS = {"float8_blocks": [8, 24]}


@pytest.mark.parametrize("scheme", sorted({name.split(".")[0] for name in load_file(PUBLISHED)}))
def test_weights_are_those_of_compressed_tensors(scheme, tmp_path) -> None:
    stored = load_file(PUBLISHED)
    parts = {name: part for name, part in stored.items() if name.startswith(f"{scheme}.weight")}
    save_file(parts, tmp_path / "model.safetensors")
    stated = compressed("mixed-precision", block_structure=BLOCKS.get(scheme))
    config = Configuration({"quantization_config": stated}, path=tmp_path / "config.json")
    with open_checkpoint(tmp_path, forms=stored_forms(config)) as checkpoint:
        assert checkpoint.names == (f"{scheme}.weight",)
        meant, name = stored[f"{scheme}.meant"], f"{scheme}.weight"
        assert torch.equal(checkpoint.read(name), meant)
        if scheme.startswith(("int4", "nvfp4", "mxfp4")):
            assert torch.equal(checkpoint.read(name, index=1), meant[1])


def test_the_model_optimizer_may_state_its_settings_in_a_file_of_its_own(copied, tmp_path) -> None:
    quantise(copied, "float8_whole_of_model_optimizer")
    settings(copied, quantization_config=None)
    with pytest.raises(ModelFileError, match="does not know"):
        convert(copied, tmp_path / "out.gguf")
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (copied / "hf_quant_config.json").write_text(json.dumps(stated))
    convert(copied, tmp_path / "out.gguf")


@pytest.mark.parametrize(("method", "wide"), [("gptq", False), ("float8_rows", True)])
def test_the_default_type_is_that_of_the_scales(method, wide, tmp_path) -> None:
    parts, _ = METHODS[method][0](torch.randn(8, 64))
    names = {
        "x." * ("." not in end) + (end if method == "gptq" else f"weight{end}"): part
        for end, part in parts.items()
    }
    save_file(names, tmp_path / "model.safetensors")
    values = {"quantization_config": METHODS[method][1]}
    config = Configuration(values, path=tmp_path / "config.json")
    with open_checkpoint(tmp_path, forms=stored_forms(config)) as checkpoint:
        assert checkpoint.wide_exponents is wide


# The types of key matrices, and of the matrices into and out of feed-forwards.
IN_BLOCKS = {
    "int4": ("Q4_0", "Q4_0", "Q4_0"),
    "int4_without_order": ("Q4_0", "Q4_0", "Q4_0"),
    "int8_packed": ("Q8_0", "Q8_0", "Q8_0"),
    "gptq_symmetric": ("Q4_0", "Q4_0", "Q4_0"),
    "nvfp4": ("NVFP4", "NVFP4", "F16"),  # its width is not a multiple of 64
    "nvfp4_of_model_optimizer": ("NVFP4", "NVFP4", "F16"),
    "mxfp4": ("MXFP4", "MXFP4", "MXFP4"),
    # These would lose bits as blocks: scales have too many, or there are zero points.
    "int8_rows": ("F16", "F16", "F16"),
    "gptq": ("F16", "F16", "F16"),
    "gptq_in_activation_order": ("F16", "F16", "F16"),
    "int4_zero_points": ("F16", "F16", "F16"),
}


@pytest.mark.parametrize("method", IN_BLOCKS)
def test_weights_stay_in_the_blocks_that_gguf_has(method, copied, tmp_path) -> None:
    quantise(copied, method)
    convert(copied, tmp_path / "found.gguf")
    convert(copied, tmp_path / "expected.gguf", type="f32")
    found = {tensor.name: tensor for tensor in Reader(tmp_path / "found.gguf").tensors}
    expected = matrices(tmp_path / "expected.gguf")
    for part, type in zip(("attn_k", "ffn_up", "ffn_down"), IN_BLOCKS[method], strict=True):
        for layer in range(2):
            name = f"blk.{layer}.{part}.weight"
            assert found[name].tensor_type.name == type
            numbers = gguf.dequantize(found[name].data, found[name].tensor_type)
            factor = found.get(name.replace("weight", "scale"))
            assert (factor is not None) == (type == "NVFP4")
            numbers = numbers if factor is None else numbers * factor.data
            if type != "F16":
                assert np.array_equal(numbers, expected[name])


def test_factors_of_experts_are_in_one_tensor(tmp_path) -> None:
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder, out = tmp_path / "Tiny-MoE", tmp_path / "out.gguf"
    write_tiny_folder(folder, Qwen3MoeConfig(**SIZES | sizes | {"head_dim": 16}))
    meant = quantise(folder, "nvfp4_of_model_optimizer")
    convert(folder, out)
    reader = Reader(out)
    found = {tensor.name: tensor for tensor in reader.tensors}
    up = found["blk.1.ffn_up_exps.weight"]
    numbers = gguf.dequantize(up.data, up.tensor_type)
    numbers = numbers * found["blk.1.ffn_up_exps.scale"].data[:, None, None]
    expected = [meant[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in range(3)]
    assert torch.equal(torch.from_numpy(numbers), torch.stack(expected))
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_NVFP4
    load_decoder(out)


DOWN = "model.layers.1.mlp.down_proj"


def lost_scale(folder: Path) -> None:
    reshaped(folder, lambda weights: weights.pop(f"{DOWN}.weight_scale"))


def wrong_shape(folder: Path) -> None:
    stated = torch.tensor([64, 1 << 40])
    reshaped(folder, lambda weights: weights.update({f"{DOWN}.weight_shape": stated}))


def wrong_group(folder: Path, group: int = 6) -> None:
    groups = torch.full((96,), group, dtype=torch.int32)
    reshaped(folder, lambda weights: weights.update({f"{DOWN}.weight_g_idx": groups}))


def negative_group(folder: Path) -> None:
    wrong_group(folder, -2)


def scales_of_integers(folder: Path) -> None:
    scale = torch.ones(64, 3, dtype=torch.int32)
    reshaped(folder, lambda weights: weights.update({f"{DOWN}.weight_scale": scale}))


def twice(folder: Path) -> None:
    reshaped(folder, lambda weights: weights.update({f"{DOWN}.weight": torch.ones(64, 96)}))


def sparse(folder: Path) -> None:
    stated = PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}
    settings(folder, quantization_config=stated)


def transformed(folder: Path) -> None:
    settings(
        folder, quantization_config=PACKED | {"transform_config": {"config_groups": {"u": {}}}}
    )


def six_bits(folder: Path) -> None:
    settings(folder, quantization_config=compressed("mxfp6-pack-quantized"))


def three_bits(folder: Path) -> None:
    settings(folder, quantization_config=GPTQ | {"bits": 3})


def without_bits(folder: Path) -> None:
    settings(folder, quantization_config={"quant_method": "gptq"})


def another_order(folder: Path) -> None:
    settings(folder, quantization_config={"quant_method": "awq", "bits": 4, "version": "gemv"})


REFUSED = {
    lost_scale: (ModelFileError, "does not know: .*down_proj.weight_packed"),
    wrong_shape: (ModelFileError, r"do not fit .*down_proj.weight_packed` \[64, 12\]"),
    wrong_group: (ModelFileError, "down_proj.weight_packed` has groups without scales"),
    negative_group: (ModelFileError, "down_proj.weight_packed` has groups without scales"),
    scales_of_integers: (UnsupportedModelError, "down_proj.weight_scale` holds .* I32"),
    twice: (ModelFileError, "down_proj.weight` is stored in two forms"),
    sparse: (UnsupportedModelError, "compressed with sparse-24-bitmask"),
    transformed: (UnsupportedModelError, "compressed with transforms"),
    six_bits: (UnsupportedModelError, "compressed with mxfp6-pack-quantized"),
    three_bits: (UnsupportedModelError, "3 bits in the format gptq"),
    without_bits: (ModelFileError, "does not determine `quantization_config`"),
    another_order: (UnsupportedModelError, "4 bits in the format gemv"),
}


@pytest.mark.parametrize("damage", REFUSED, ids=lambda damage: damage.__name__)
def test_what_cannot_be_converted_is_refused(damage, copied, tmp_path) -> None:
    quantise(copied, "int4")
    damage(copied)
    kind, said = REFUSED[damage]
    with pytest.raises(kind, match=said):
        convert(copied, tmp_path / "out.gguf")
