"""Rotary embeddings: positions to angles, and heads turned by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from runtime.kernels.pointwise import rope_halves, rope_interleaved


class Pairs(Enum):
    """Which dimensions of a head turn together: (2i, 2i + 1), or (i, i + rotated / 2)."""

    INTERLEAVED = "interleaved"
    NEOX = "neox"


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """One step's angles: cos and sin float32 [tokens, rotated / 2]."""

    cos: Tensor
    sin: Tensor
    pairs: Pairs

    def to(self, device: torch.device) -> "Rotation":
        return Rotation(self.cos.to(device), self.sin.to(device), self.pairs)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, heads, dim] -> like x."""
        turn = rope_interleaved if self.pairs is Pairs.INTERLEAVED else rope_halves
        return turn(x, self.cos, self.sin)


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Frequency i turns by position * frequencies[i] (Su et al., "RoFormer", section 3).

    `frequencies` float32 [rotated / 2]; `magnitude` multiplies what is turned. `axes` int64
    [rotated / 2]: which of several positions of a token each frequency goes by. The angles are
    computed once per step for all layers, in three small operations: a table for a context of
    128k tokens would take 64 MB and two operations.
    """

    frequencies: Tensor
    pairs: Pairs
    magnitude: float = 1.0
    axes: Tensor | None = None

    def __call__(self, positions: Tensor) -> Rotation:
        """positions int64 [tokens], or [axes, tokens] where frequencies go by several."""
        if positions.dim() == 2:
            assert self.axes is not None, "positions in several dimensions, and nothing uses them"
            angles = positions.index_select(0, self.axes).t() * self.frequencies
        else:
            angles = positions.unsqueeze(1) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos.mul_(self.magnitude), sin.mul_(self.magnitude)
        return Rotation(cos, sin, self.pairs)


def axes_of(sections: Sequence[int], count: int, *, interleaved: bool) -> Tensor:
    """Which axis each of `count` frequencies goes by, int64 [count]: time, row or column.

    `sections`: how many frequencies each axis has. They follow one another (Wang et al.,
    "Qwen2-VL", section 2.1), or take turns as long as rows and columns have some left, the rest
    being time's (Bai et al., "Qwen3-VL Technical Report", section 2.1).
    """
    time, rows, columns = sections
    assert time + rows + columns == count, "sections are not all of the frequencies"
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(count, dtype=torch.int64)
    axes[1 : 3 * rows : 3] = 1
    axes[2 : 3 * columns : 3] = 2
    return axes
