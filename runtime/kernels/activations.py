"""The rows that products take, which a norm or attention may have rounded for them."""

from dataclasses import dataclass

from torch import Tensor

# CUDA devices round up to so many rows; products of more use tensor cores.
MOST_ROUNDED_ROWS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """Activations as integers with one scale for each group of 32 elements of a row; see
    triton/rounded.py. planes: int8 [1 or 2, 2, rows, in / 32, 16], the first halves of all groups
    before the second ones; scales: float32 [rows, in / 32]; sums: int32 [rows, in / 32, 2], of the
    integers of each half of a group."""

    planes: Tensor
    scales: Tensor
    sums: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RoundedActivations:
    """x [rows, in], and the integers to which products round it."""

    x: Tensor
    rounded: Rounded


Activations = Tensor | RoundedActivations


def unrounded(x: Activations) -> Tensor:
    """The rows themselves, [rows, in]."""
    return x.x if isinstance(x, RoundedActivations) else x
