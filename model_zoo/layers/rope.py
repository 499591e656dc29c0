"""Rotary embeddings: positions to angles, and heads turned by them."""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from runtime.kernels.pointwise import rope_halves, rope_interleaved


class Pairs(Enum):
    """Which dimensions of a head turn together: (2i, 2i + 1), or (i, i + rotated / 2)."""

    INTERLEAVED = "interleaved"
    HALVES = "halves"


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """One step's angles: cos and sin float32 [tokens, rotated / 2]."""

    cos: Tensor
    sin: Tensor
    pairs: Pairs

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, heads, dim] -> like x."""
        turn = rope_interleaved if self.pairs is Pairs.INTERLEAVED else rope_halves
        return turn(x, self.cos, self.sin)


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Frequency i turns by position * frequencies[i] (Su et al., "RoFormer", section 3).

    `frequencies` float32 [rotated / 2]; `magnitude` multiplies what is turned. The angles are
    computed once per step for all layers, in three small operations: a table for a context of
    128k tokens would take 64 MB and two operations.
    """

    frequencies: Tensor
    pairs: Pairs
    magnitude: float = 1.0

    def __call__(self, positions: Tensor) -> Rotation:
        """positions [tokens] int64."""
        angles = positions.unsqueeze(1) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos.mul_(self.magnitude), sin.mul_(self.magnitude)
        return Rotation(cos, sin, self.pairs)
