"""Least-squares scales and minima for groups of weights.

A group is rounded with several candidate scales. Each rounding has a best scale in closed form, and
the candidate with the least squared error is chosen. Groups are columns, [group, groups], so that
sums run over contiguous memory.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Candidate scales map the largest weight to the end of the range shifted by these steps. Beyond the
# end it is clamped, which is better if it is an outlier.
_SHIFTS = tuple(third / 3 for third in range(-3, 8))
_LARGE = 1e36


def inverse(numbers: Tensor) -> Tensor:
    """1 / numbers, and 0 where that would overflow later."""
    inverted = numbers.reciprocal()
    return torch.where(inverted.abs() < _LARGE, inverted, 0.0)


def peak(weights: Tensor) -> Tensor:
    """[group, groups] -> [groups]: the weight furthest from 0, with its sign."""
    low, high = weights.aminmax(dim=0)
    return torch.where(high > -low, high, low)


def scale_of(weights: Tensor, levels: int) -> Tensor:
    """[group, groups] -> [groups]: for values from -levels to levels - 1."""
    fit = _ScaleFit(weights)
    values = torch.empty_like(weights)
    for factor in _candidates(-inverse(peak(weights)), levels):
        fit.offer(rounded(weights, factor, -levels, levels - 1, out=values))
    return fit.offer(rounded(weights, inverse(fit.scale), -levels, levels - 1, out=values)).scale


def scale_and_minimum_of(weights: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """[group, groups] -> scale and minimum [groups], weights being scale * value - minimum.

    For values from 0 to `highest`; the minimum is 0 or more.
    """
    low, high = weights.aminmax(dim=0)
    low.clamp_(max=0)
    fit = _AffineFit(weights)
    values = torch.empty_like(weights)
    above = weights - low
    for factor in _candidates(inverse(high - low), highest):
        fit.offer(rounded(above, factor, 0, highest, out=values))
    torch.add(weights, fit.minimum, out=above)
    fit.offer(rounded(above, inverse(fit.scale), 0, highest, out=values))
    return fit.scale, fit.minimum


def rounded(
    weights: Tensor, factor: Tensor, lowest: int, highest: int, *, out: Tensor | None = None
) -> Tensor:
    """[group, groups] times [groups], rounded and clamped to the range, in float32."""
    return torch.mul(weights, factor, out=out).round_().clamp_(lowest, highest)


def _candidates(unit: Tensor, levels: int) -> Iterator[Tensor]:
    return (unit * (levels + shift) for shift in _SHIFTS)


class _ScaleFit:
    """The best scale so far; its gain is the reduction of the sum of squared errors."""

    def __init__(self, weights: Tensor) -> None:
        self.scale = weights.new_zeros(weights.shape[1])
        self._gain = torch.zeros_like(self.scale)
        self._weights = weights
        self._product = torch.empty_like(weights)

    def offer(self, values: Tensor) -> "_ScaleFit":
        """Considers a rounding of the weights, [group, groups]."""
        mixed = torch.mul(values, self._weights, out=self._product).sum(0)
        squares = torch.mul(values, values, out=self._product).sum(0)
        scale = mixed * inverse(squares)
        gain = scale * mixed
        better = gain > self._gain
        self.scale = torch.where(better, scale, self.scale)
        self._gain = torch.where(better, gain, self._gain)
        return self


class _AffineFit:
    """The best scale and minimum so far; minima are at least 0."""

    def __init__(self, weights: Tensor) -> None:
        self.scale = weights.new_zeros(weights.shape[1])
        self.minimum = torch.zeros_like(self.scale)
        self._gain = torch.zeros_like(self.scale)
        self._weights = weights
        self._sum = weights.sum(0)
        self._product = torch.empty_like(weights)

    def offer(self, values: Tensor) -> None:
        """Considers a rounding of the weights, [group, groups]."""
        count = len(values)
        total = values.sum(0)
        mixed = torch.mul(values, self._weights, out=self._product).sum(0)
        squares = torch.mul(values, values, out=self._product).sum(0)
        determinant = inverse(count * squares - total * total)
        minimum = (total * mixed - squares * self._sum) * determinant
        affine = (minimum >= 0) & (determinant > 0)
        scale = (count * mixed - total * self._sum) * determinant
        scale = torch.where(affine, scale, mixed * inverse(squares))
        minimum = torch.where(affine, minimum, 0.0)
        gain = scale * mixed - minimum * self._sum
        better = gain > self._gain
        self.scale = torch.where(better, scale, self.scale)
        self.minimum = torch.where(better, minimum, self.minimum)
        self._gain = torch.where(better, gain, self._gain)
