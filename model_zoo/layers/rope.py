"""Rotary angles: positions to cosines and sines."""

import torch
from torch import Tensor


class Rotary:
    """Frequency i turns by position * scale * base^(-2i / dim) / factors[i] (RoFormer, section 3).

    `factors` float32 [dim / 2], such as Llama 3.1's; None means ones. The angles are computed once
    per step for all layers, in three small operations: a table for a context of 128k tokens would
    take 64 MB and two operations.
    """

    def __init__(
        self, dim: int, base: float, *, scale: float, factors: Tensor | None, device: torch.device
    ) -> None:
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequencies = (scale / base**exponents).to(device)
        self._frequencies = frequencies if factors is None else frequencies / factors

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens] -> cos and sin, float32 [tokens, dim / 2]."""
        angles = positions.unsqueeze(1) * self._frequencies
        return angles.cos(), angles.sin()
