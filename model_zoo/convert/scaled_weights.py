"""Weights of few bits with scales: per tensor, row, block or group of columns."""

from math import prod

import torch
from torch import Tensor

Block = tuple[int, int]
Shape = tuple[int, ...]
# Bias of the exponents of 8-bit scales (E8M0).
_BIAS = 127


def fits(weight: Shape, scale: Shape, block: Block | None, parts: int = 1) -> bool:
    """Whether scales of this shape fit a weight [..., out, in].

    They may be one for the tensor; one per row, [..., out]; of any shape that broadcasts; one per
    group of columns, [..., out, groups]; or one per block of `block` rows and columns, into which
    each of `parts` equal parts of the rows is divided separately.
    """
    if prod(scale) == 1 or scale == weight[:-1]:
        return True
    if len(weight) < 2 or len(scale) != len(weight):
        return False
    if block is not None and scale == _blocks(weight, block, parts):
        return True
    if all(own in (1, size) for own, size in zip(scale, weight, strict=True)):
        return True
    return scale[:-1] == weight[:-1] and scale[-1] > 0 and weight[-1] % scale[-1] == 0


def scaled(weight: Tensor, scale: Tensor, block: Block | None = None, parts: int = 1) -> Tensor:
    """weight [..., out, in], scale as in `fits` -> float32 [..., out, in]."""
    return weight.float() * spread(_numbers(scale), weight.shape, block, parts)


def spread(scale: Tensor, shape: Shape, block: Block | None = None, parts: int = 1) -> Tensor:
    """Scales or zero points as in `fits` -> a tensor that broadcasts to `shape`."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() < len(shape):
        return scale.unsqueeze(-1)
    if block is not None and scale.shape == _blocks(shape, block, parts):
        rows = torch.arange(shape[-2] // parts) // block[0]
        first = torch.arange(parts) * (scale.shape[-2] // parts)
        columns = torch.arange(shape[-1]) // block[1]
        return scale[..., (first[:, None] + rows).view(-1, 1), columns]
    if scale.shape[-1] in (1, shape[-1]):
        return scale
    return scale.repeat_interleave(shape[-1] // scale.shape[-1], dim=-1)


def _power_of_two(exponents: Tensor) -> Tensor:
    """uint8 exponents (E8M0) -> float32."""
    return torch.exp2(exponents.float() - _BIAS)


def _numbers(scale: Tensor) -> Tensor:
    return _power_of_two(scale) if scale.dtype is torch.uint8 else scale.float()


def _blocks(weight: Shape, block: Block, parts: int) -> Shape | None:
    """The number of blocks in both dimensions, where the last ones of each part may be smaller;
    None if the rows cannot be divided into equal parts."""
    if weight[-2] % parts:
        return None
    rows = parts * -(-(weight[-2] // parts) // block[0])
    return (*weight[:-2], rows, -(-weight[-1] // block[1]))
