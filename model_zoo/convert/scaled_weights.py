"""Weights of 8-bit floats (FP8, E4M3) with scales, as several models are published."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from model_zoo.convert.configuration import Configuration
from runtime.errors import UnsupportedModelError

SCALED = "F8_E4M3"
_METHOD = "fp8"
Block = tuple[int, int]


def scale_block(config: Configuration) -> Block | None:
    """Rows and columns of the blocks of weights with one scale; None if the settings state none.

    UnsupportedModelError for checkpoints that are quantised in another way, except MXFP4, whose
    blocks GGUF has, and BitNet's before their weights are rounded.
    """
    stated = config.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if method in (None, "mxfp4"):
        return None
    if method == "bitnet" and stated.get("quantization_mode") == "online":
        return None
    if method != _METHOD:
        raise UnsupportedModelError(
            f"{config.path}: its weights are quantised ({method}); convert the original checkpoint "
            "instead."
        )
    block = stated.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
        raise config.error(f"has {str(block)[:80]} as `weight_block_size`, not two sizes")
    return block[0], block[1]


def scale_name(weight: str) -> str:
    """The name of a weight's scales."""
    return f"{weight}_scale_inv"


def activation_scale_names(weight: str) -> tuple[str, ...]:
    """Names of scales with which other programs round the inputs of a product."""
    return f"{weight.removesuffix('.weight')}.activation_scale", f"{weight}_activation_scale"


def fits(weight: tuple[int, ...], scale: tuple[int, ...], block: Block | None) -> bool:
    """Whether scales of this shape are those of a weight [..., out, in]: one for the tensor, else
    one for each block, or without blocks of a shape that is broadcast."""
    if prod(scale) == 1:
        return True
    if block is None:
        return len(scale) == len(weight) and all(
            own in (1, size) for own, size in zip(scale, weight, strict=True)
        )
    counts = [-(-size // part) for size, part in zip(weight[-2:], block, strict=False)]
    return len(weight) > 1 and scale == (*weight[:-2], *counts)


def scaled(weight: Tensor, scale: Tensor, block: Block | None) -> Tensor:
    """weight [..., out, in] of 8-bit floats, scale as in `fits` -> float32 [..., out, in]."""
    factors = scale.float()
    if factors.numel() == 1:
        return weight.float() * factors.reshape(())
    if block is not None:
        rows, columns = (
            torch.arange(size) // part for size, part in zip(weight.shape[-2:], block, strict=True)
        )
        factors = factors[..., rows[:, None], columns]
    return weight.float() * factors


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
