"""Rotary embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from runtime.kernels.pointwise import rope_halves, rope_interleaved, rotary_angles


class Pairs(Enum):
    """Which dimensions of a head are rotated together: (2i, 2i + 1), or (i, i + rotated / 2)."""

    INTERLEAVED = "interleaved"
    NEOX = "neox"


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The angles of one step: cos and sin float32 [tokens, rotated / 2]."""

    cos: Tensor
    sin: Tensor
    pairs: Pairs

    @property
    def halves(self) -> bool:
        return self.pairs is Pairs.NEOX

    def to(self, device: torch.device) -> "Rotation":
        return Rotation(self.cos.to(device), self.sin.to(device), self.pairs)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, heads, dim] -> like x."""
        turn = rope_halves if self.halves else rope_interleaved
        return turn(x, self.cos, self.sin)


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Frequencies of a rotary embedding (Su et al., "RoFormer", section 3): angles are position *
    frequency.

    frequencies: float32 [rotated / 2]. magnitude: factor of rotated queries and keys.
    axes: int64 [rotated / 2], the axis whose position each frequency uses, one of `position_axes`.

    Angles are computed once per step for all layers; a table for a context of 128k tokens would
    take 64 MB.
    """

    frequencies: Tensor
    pairs: Pairs
    magnitude: float = 1.0
    axes: Tensor | None = None
    position_axes: int = 1

    def __call__(self, positions: Tensor) -> Rotation:
        """positions int64 [tokens], or [axes, tokens] if tokens have several positions."""
        axes = None if positions.dim() == 1 else self.axes
        cos, sin = rotary_angles(positions, self.frequencies, axes, self.magnitude)
        return Rotation(cos, sin, self.pairs)


def axes_of(sections: Sequence[int], count: int, *, interleaved: bool) -> Tensor:
    """The axis that each of `count` frequencies uses, int64 [count].

    sections: the number of frequencies of each axis. They are consecutive (Wang et al., "Qwen2-VL",
    section 2.1) or, for three axes, interleaved (Bai et al., "Qwen3-VL Technical Report", section
    2.1). If these are too long, their ends are left out.
    """
    if not interleaved:
        assert sum(sections) == count, "sections are not all of the frequencies"
        return torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
    _, rows, columns = sections
    assert sum(sections) >= count, "sections are not all of the frequencies"
    axes = torch.zeros(count, dtype=torch.int64)
    axes[1 : 3 * rows : 3] = 1
    axes[2 : 3 * columns : 3] = 2
    return axes
