"""Checkpoints of 8-bit floats with scales are converted as the weights that they stand for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from model_zoo.convert.checkpoint_reader import open_checkpoint
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.convert_folder import convert
from model_zoo.convert.quantization_methods import stored_forms
from model_zoo.convert.scaled_weights import scaled
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.unit.model_zoo.convert.checkpoint_changes import copy, reshaped, settings

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT_BITS).max


def rounded(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of 8 bits, their scales by block, and the numbers that they stand for."""
    small, meant = torch.empty_like(weight, dtype=EIGHT_BITS), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (
                slice(row * rows, row * rows + rows),
                slice(column * columns, column * columns + columns),
            )
            scales[row, column] = weight[part].abs().max() / LARGEST
            small[part] = (weight[part] / scales[row, column]).to(EIGHT_BITS)
            meant[part] = small[part].float() * scales[row, column]
    return small, scales, meant


def stated(**values: object) -> Configuration:
    return Configuration({"quantization_config": values}, path=Path("config.json"))


def in_blocks(folder: Path, meant: Path) -> None:
    """Blocks that divide no matrix, so that those at the edges are smaller."""

    def change(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "_proj" in name]:
            weights[name], weights[f"{name}_scale_inv"], plain[name] = rounded(
                weights[name], 40, 24
            )

    plain: dict[str, Tensor] = {}
    reshaped(folder, change)
    reshaped(meant, lambda weights: weights.update(plain))
    settings(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [40, 24]})


def whole(folder: Path, meant: Path) -> None:
    """One scale for a tensor, and scales of activations, as in Ministral 3."""

    def change(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "mlp" in name]:
            small, scale, plain[name] = rounded(weights[name], *weights[name].shape)
            module = name.removesuffix(".weight")
            weights |= {name: small, f"{name}_scale_inv": scale.reshape(())}
            weights[f"{module}.activation_scale"] = torch.tensor(2.0)

    plain: dict[str, Tensor] = {}
    reshaped(folder, change)
    reshaped(meant, lambda weights: weights.update(plain))
    settings(folder, quantization_config={"quant_method": "fp8", "weight_block_size": None})


@pytest.mark.parametrize("quantised", [in_blocks, whole])
@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_weights_are_multiplied_by_their_scales(quantised, type, copied, tmp_path) -> None:
    meant = copy(copied, tmp_path / "meant" / copied.name)
    quantised(copied, meant)
    for folder, name in ((meant, "expected"), (copied, "found")):
        convert(folder, tmp_path / name, type=type)
    assert (tmp_path / "expected").read_bytes() == (tmp_path / "found").read_bytes()


def test_scaled_weights_are_those_of_transformers() -> None:
    small, scales, _ = rounded(torch.randn(256, 384), 128, 128)
    expected = Fp8Dequantize(None)._dequantize_one(small, scales, torch.float32)
    assert torch.equal(scaled(small, scales, (128, 128)), expected)


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 1, 1), (1, 1, 1), (3, 4, 1), (3, 4)])
def test_a_slice_of_stacked_weights_has_its_own_scales(shape, tmp_path) -> None:
    small = torch.randn(3, 4, 8).to(EIGHT_BITS)
    scales = torch.rand(shape) + 0.5
    save_file({"experts": small, "experts_scale_inv": scales}, tmp_path / "model.safetensors")
    block = [2, 2] if shape == (3, 2, 4) else None
    config = stated(quant_method="fp8", weight_block_size=block)
    with open_checkpoint(tmp_path, forms=stored_forms(config)) as checkpoint:
        assert checkpoint.names == ("experts",)
        stacked = checkpoint.read("experts")
        for index in range(3):
            assert torch.equal(checkpoint.read("experts", index=index), stacked[index])


def lost_scales(folder: Path) -> None:
    reshaped(folder, lambda w: w.pop("model.layers.1.mlp.down_proj.weight_scale_inv"))


def too_few_scales(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    reshaped(folder, lambda w: w.update({name: w[name][:1].clone()}))


def blocks_of_text(folder: Path) -> None:
    settings(folder, quantization_config={"quant_method": "fp8", "weight_block_size": ["a", 1]})


def scales_of_integers(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    reshaped(folder, lambda w: w.update({name: w[name].int()}))


REFUSED = {
    lost_scales: (UnsupportedModelError, "down_proj.weight` holds numbers of type F8_E4M3"),
    too_few_scales: (ModelFileError, r"do not fit .*down_proj.weight_scale_inv` \[1, 4\]"),
    blocks_of_text: (ModelFileError, r"\['a', 1\] as `weight_block_size`"),
    scales_of_integers: (UnsupportedModelError, "down_proj.weight_scale_inv` holds .* I32"),
}


@pytest.mark.parametrize("damage", REFUSED, ids=lambda damage: damage.__name__)
def test_scales_that_do_not_fit_are_refused(damage, copied, tmp_path) -> None:
    in_blocks(copied, copy(copied, tmp_path / "meant"))
    damage(copied)
    kind, said = REFUSED[damage]
    with pytest.raises(kind, match=said):
        convert(copied, tmp_path / "out.gguf")


def test_bitnet_is_converted_before_its_weights_are_rounded() -> None:
    stored_forms(stated(quant_method="bitnet", quantization_mode="online"))
    with pytest.raises(UnsupportedModelError, match=r"quantised \(bitnet\)"):
        stored_forms(stated(quant_method="bitnet", quantization_mode="offline"))
