"""Weights as quantisation libraries store them, written from the formats' public definitions.

Each function rounds a weight [out, in], and returns its parts by the suffixes of their names (""
for the weight's own name) and the numbers that they represent.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Quantised = tuple[dict[str, Tensor], Tensor]
FLOAT8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NIBBLES_OF_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unsigned integers [rows, n] -> int32 [rows, words]. `order`: the column at each place of a
    word."""
    order = order or range(32 // bits)
    rows = numbers.contiguous().numpy().astype(np.uint64)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % len(order))))
    grouped = rows.reshape(len(rows), -1, len(order))
    packed = sum(grouped[..., column] << bits * place for place, column in enumerate(order))
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def by_groups(weight: Tensor, groups: Tensor, least: int, most: int) -> tuple[Tensor, ...]:
    """Integers from `least` to `most`, and float32 scales and zero points [out, groups]."""
    scale = torch.empty(len(weight), int(groups.max()) + 1)
    zero = torch.empty_like(scale)
    for group in range(scale.shape[1]):
        low, high = weight[:, groups == group].aminmax(dim=1)
        scale[:, group] = ((high - low) / (most - least)).half().float()
        zero[:, group] = (least - low / scale[:, group]).round().clamp(least, most)
    integers = (weight / scale[:, groups] + zero[:, groups]).round().clamp(least, most)
    return integers + 0.0, scale, zero  # not -0.0


def float8_whole(weight: Tensor) -> Quantised:
    scale = (weight.abs().max() / 448).reshape(1)
    rounded = (weight / scale).to(FLOAT8)
    parts = {"": rounded, "_scale": scale, ".input_scale": torch.ones(1)}
    return parts, rounded.float() * scale


def float8_rows(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 448
    rounded = (weight / scale).to(FLOAT8)
    return {"": rounded, "_scale": scale}, rounded.float() * scale


def float8_rows_of_model_optimizer(weight: Tensor) -> Quantised:
    parts, meant = float8_rows(weight)
    return {**parts, "_scale": parts["_scale"].flatten()}, meant


def float8_exponents(weight: Tensor) -> Quantised:
    """MXFP8."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = torch.log2(groups.abs().amax(2, keepdim=True) / 448).ceil()
    rounded = (groups / 2**exponents).to(FLOAT8)
    parts = {"": rounded.flatten(1), "_scale": (exponents + 127).squeeze(2).byte()}
    return parts, (rounded.float() * 2**exponents).flatten(1)


def int8_rows(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scale).round() + 0.0  # not -0.0
    return {"": rounded.char(), "_scale": scale}, rounded * scale


def int8_zero_points(weight: Tensor, *, columns: int) -> Quantised:
    groups = torch.arange(weight.shape[1]) // columns
    rounded, scale, zero = by_groups(weight, groups, -128, 127)
    parts = {"": rounded.char(), "_scale": scale, "_zero_point": zero.char()}
    return parts, (rounded - zero[:, groups]) * scale[:, groups]


def packed(weight: Tensor, *, bits: int, columns: int, zero_points: bool = False) -> Quantised:
    """compressed-tensors' `pack-quantized`."""
    half = 1 << bits - 1
    groups = torch.arange(weight.shape[1]) // columns
    rounded, scale, zero = by_groups(weight, groups, -half, half - 1)
    zero = zero if zero_points else torch.zeros_like(zero)
    parts = {
        "_packed": words(rounded + half, bits),
        "_scale": scale,
        "_shape": torch.tensor(weight.shape),
    }
    if zero_points:
        parts["_zero_point"] = words(zero.t() + half, bits).t().contiguous()
    return parts, (rounded - zero[:, groups]) * scale[:, groups]


def packed_in_activation_order(weight: Tensor) -> Quantised:
    order = torch.randperm(weight.shape[1])
    parts, meant = packed(weight[:, order], bits=4, columns=16)
    inverse = order.argsort()
    integers = (parts["_packed"].unsqueeze(-1) >> torch.arange(0, 32, 4)).flatten(1) & 15
    groups = (torch.arange(weight.shape[1]) // 16)[inverse]
    shuffled = {"_packed": words(integers[:, inverse], 4), "_g_idx": groups.int()}
    return parts | shuffled, meant[:, inverse]


def packed_without_order(weight: Tensor) -> Quantised:
    """With groups that no calibration has assigned."""
    parts, meant = packed(weight, bits=4, columns=32)
    return parts | {"_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32)}, meant


def nearest_e2m1(numbers: Tensor) -> Tensor:
    """The E2M1 code of each number."""
    places = (numbers.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return (places + 8 * (numbers < 0)).byte()


def value_of_e2m1(bits: Tensor) -> Tensor:
    return E2M1[(bits & 7).int()] * torch.where(bits > 7, -1.0, 1.0) + 0.0  # not -0.0


def pairs(bits: Tensor) -> Tensor:
    return bits[:, ::2] | bits[:, 1::2] << 4


def nvfp4_parts(weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes and E4M3 scales of numbers that `factor` multiplies, and the numbers they represent."""
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(2) / 6 / factor).to(FLOAT8)
    steps = scale.float().unsqueeze(2) * factor
    bits = nearest_e2m1(groups / steps)
    return pairs(bits.flatten(1)), scale, (value_of_e2m1(bits) * steps).flatten(1)


def nvfp4(weight: Tensor) -> Quantised:
    """compressed-tensors' form, in which the global scale divides. It is a power of two, so the
    order of multiplications does not matter."""
    divisor = 2 ** (448 * 6 / weight.abs().max()).log2().floor().reshape(1)
    rounded, scale, meant = nvfp4_parts(weight, 1 / divisor)
    parts = {"_packed": rounded, "_scale": scale, "_global_scale": divisor}
    return {**parts, ".input_global_scale": torch.ones(1)}, meant


def nvfp4_of_model_optimizer(weight: Tensor) -> Quantised:
    factor = 2 ** (weight.abs().max() / 448 / 6).log2().ceil()
    rounded, scale, meant = nvfp4_parts(weight, factor)
    parts = {"": rounded, "_scale": scale, "_scale_2": factor}
    return {**parts, ".input_scale": torch.tensor(1.0)}, meant


def mxfp4(weight: Tensor) -> Quantised:
    groups = weight.unflatten(1, (-1, 32))
    exponents = torch.log2(groups.abs().amax(2, keepdim=True) / 6).ceil()
    bits = nearest_e2m1(groups / 2**exponents)
    parts = {
        "_packed": pairs(bits.flatten(1)),
        "_scale": (exponents + 127).squeeze(2).byte(),
    }
    return parts, (value_of_e2m1(bits) * 2**exponents).flatten(1)


def gptq(
    weight: Tensor, *, bits: int, less: int = 1, ordered: bool = True, zero_points: bool = True
) -> Quantised:
    """`less`: what is subtracted from stored zero points, whole words at a time as in GPTQModel.
    `zero_points`: whether these differ from the middle."""
    groups = torch.arange(weight.shape[1]) // 32
    groups = groups if ordered else groups[torch.randperm(len(groups))]
    rounded, scale, zero = by_groups(weight, groups, 0, (1 << bits) - 1)
    zero = zero if zero_points else torch.full_like(zero, 1 << bits - 1)
    ones = words(torch.full((1, 32 // bits), less), bits)
    parts = {
        "qweight": words(rounded, bits).t().contiguous(),
        "qzeros": words(zero.t(), bits) - ones,
        "scales": scale.t().half().contiguous(),
        "g_idx": groups.int(),
    }
    return parts, (rounded - zero[:, groups]) * scale[:, groups]


def awq(weight: Tensor) -> Quantised:
    groups = torch.arange(weight.shape[1]) // 32
    rounded, scale, zero = by_groups(weight, groups, 0, 15)
    parts = {
        "qweight": words(rounded.t(), 4, NIBBLES_OF_AWQ),
        "qzeros": words(zero.t(), 4, NIBBLES_OF_AWQ),
        "scales": scale.t().half().contiguous(),
    }
    return parts, (rounded - zero[:, groups]) * scale[:, groups]
