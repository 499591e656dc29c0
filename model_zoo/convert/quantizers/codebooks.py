"""Types with four-bit indices into sixteen values: IQ4_NL, denser near 0, and MXFP4."""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from model_zoo.convert.quantizers.fitting import inverse, peak
from model_zoo.convert.quantizers.packing import halves, nibbles

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Candidates for the value of the weight furthest from 0: near -127 or 113, or clamped.
_ENDS = (-140, -136, -133, -130, -127, -124, -120, -116, 105, 109, 113, 117, 121, 125)
# Magnitudes of E2M1, doubled. To compensate, a block's exponent counts from -128.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
_BIAS = 128
# Powers of two from the first to the last of these are finite and not denormal.
_LEAST, _MOST = 2, 252


def iq4_nl(blocks: Tensor) -> Tensor:
    """float32 [n, 32] -> uint8 [n, 18], with the scale of least error among several."""
    columns = blocks.t().contiguous()
    unit = inverse(peak(columns))
    scale, gain = torch.zeros_like(unit), torch.zeros_like(unit)
    for end in _ENDS:
        scale, gain = _fitted(columns, unit * end, scale, gain)
    scale, _ = _fitted(columns, inverse(scale), scale, gain)
    scale = scale.to(torch.float16).float()
    index = _index_at(_places(columns * inverse(scale), _NONLINEAR), _NONLINEAR)
    return torch.cat([halves(scale.unsqueeze(1)), nibbles(index.t())], dim=1)


def mxfp4(blocks: Tensor) -> Tensor:
    """float32 [n, 32] -> uint8 [n, 17].

    The scale is the power of two that maps the largest weight to between 4 and 8, although the
    largest value is 6, or twice that if its error is smaller.
    """
    magnitudes = blocks.abs()
    largest = magnitudes.amax(dim=1, keepdim=True)
    fine = (torch.frexp(largest).exponent - 4 + _BIAS).clamp_(_LEAST, _MOST)
    coarse = (fine + 1).clamp_(max=_MOST)
    fine_index, fine_loss = _in_e2m1(magnitudes, fine)
    coarse_index, coarse_loss = _in_e2m1(magnitudes, coarse)
    better = 4 * coarse_loss < fine_loss
    index = torch.where(better, coarse_index, fine_index)
    index += ((blocks < 0) & (index > 0)).to(torch.uint8) << 3
    exponent = torch.where(largest == 0, 0, torch.where(better, coarse, fine))
    return torch.cat([exponent.to(torch.uint8), nibbles(index)], dim=1)


def _fitted(columns: Tensor, factor: Tensor, scale: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """The better of `scale` and the best scale for the values after multiplying by `factor`.

    The gain is the reduction of the sum of squared errors.
    """
    chosen = _value_at(_places(columns * factor, _NONLINEAR), _NONLINEAR)
    mixed = (chosen * columns).sum(0)
    fitted = mixed * inverse(chosen.square_().sum(0))
    fitted_gain = fitted * mixed
    better = fitted_gain > gain
    return torch.where(better, fitted, scale), torch.where(better, fitted_gain, gain)


def _in_e2m1(magnitudes: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Indices uint8 [n, 32], and the squared error [n, 1] as a multiple of the scale's square."""
    scaled = torch.ldexp(magnitudes, _BIAS - exponent)
    places = _places(scaled, _E2M1)
    loss = scaled.sub_(_value_at(places, _E2M1)).square_().sum(1, keepdim=True)
    return _index_at(places, _E2M1), loss


def _places(numbers: Tensor, values: tuple[int, ...]) -> Tensor:
    """int32 of the same shape: index of the nearest value, in units of a table with half steps.

    The bounds between values are multiples of a half, so twice the number, rounded up, is an
    index. Ties go to the lower value.
    """
    low, high = 2 * values[0], 2 * values[-1]
    return (numbers * 2).ceil_().clamp_(low, high).sub_(low).int()


def _index_at(places: Tensor, values: tuple[int, ...]) -> Tensor:
    """The index of the value at each of `places`, uint8."""
    table = _indices(values, places.device)
    return table.index_select(0, places.view(-1)).view(places.shape)


def _value_at(places: Tensor, values: tuple[int, ...]) -> Tensor:
    """The value at each of `places`, float32."""
    table = _values(values, places.device)
    return table.index_select(0, places.view(-1)).view(places.shape)


@cache
def _indices(values: tuple[int, ...], device: torch.device) -> Tensor:
    bounds = torch.tensor([low + high for low, high in pairwise(values)], device=device)
    places = torch.arange(2 * values[0], 2 * values[-1] + 1, device=device)
    return torch.bucketize(places, bounds).to(torch.uint8)


@cache
def _values(values: tuple[int, ...], device: torch.device) -> Tensor:
    index = _indices(values, device).int()
    return torch.tensor(values, dtype=torch.float32, device=device).index_select(0, index)
