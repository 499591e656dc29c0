"""The K-quants: fits every group, quantises the scales, then chooses among adjacent scales.

Internally weights are columns [group, groups], scales and minima [blocks, groups of a block].
"""

import torch
from torch import Tensor

from model_zoo.convert.quantizers.fitting import (
    inverse,
    peak,
    rounded,
    scale_and_minimum_of,
    scale_of,
)
from model_zoo.convert.quantizers.packing import halves, packed, signed_bytes

_NEARBY = (0, -1, 1)
_LEAST_HALF = 2.0**-24


def q2_k(blocks: Tensor) -> Tensor:
    """float32 [n, 256] -> uint8 [n, 84]."""
    scale, minimum, steps, lows, values = _affine(blocks, group=16, highest=3, most=15)
    scales = (steps | (lows << 4), packed(values.view(-1, 2, 4, 32), 2).flatten(1))
    return torch.cat([*scales, halves(scale), halves(minimum)], dim=1)


def q3_k(blocks: Tensor) -> Tensor:
    """float32 [n, 256] -> uint8 [n, 110]."""
    scale, steps, values = _symmetric(blocks, levels=4, most=32)
    stored = (steps + 32).to(torch.uint8)
    parts = [
        packed((values >> 2).view(-1, 1, 8, 32), 1).flatten(1),
        packed((values & 3).view(-1, 2, 4, 32), 2).flatten(1),
        packed((stored & 15).view(-1, 1, 2, 8), 4).flatten(1),
        packed((stored >> 4).view(-1, 1, 4, 4), 2).flatten(1),
        halves(scale),
    ]
    return torch.cat(parts, dim=1)


def q4_k(blocks: Tensor) -> Tensor:
    """float32 [n, 256] -> uint8 [n, 144]."""
    scale, minimum, steps, lows, values = _affine(blocks, group=32, highest=15, most=63)
    nibbles = packed(values.view(-1, 4, 2, 32), 4).flatten(1)
    return torch.cat([halves(scale), halves(minimum), _six_bits(steps, lows), nibbles], dim=1)


def q5_k(blocks: Tensor) -> Tensor:
    """float32 [n, 256] -> uint8 [n, 176]."""
    scale, minimum, steps, lows, values = _affine(blocks, group=32, highest=31, most=63)
    high = packed((values >> 4).view(-1, 1, 8, 32), 1).flatten(1)
    nibbles = packed((values & 15).view(-1, 4, 2, 32), 4).flatten(1)
    parts = [halves(scale), halves(minimum), _six_bits(steps, lows), high, nibbles]
    return torch.cat(parts, dim=1)


def q6_k(blocks: Tensor) -> Tensor:
    """float32 [n, 256] -> uint8 [n, 210]."""
    scale, steps, values = _symmetric(blocks, levels=32, most=128)
    parts = [
        packed((values & 15).view(-1, 2, 2, 64), 4).flatten(1),
        packed((values >> 4).view(-1, 2, 4, 32), 2).flatten(1),
        signed_bytes(steps),
        halves(scale),
    ]
    return torch.cat(parts, dim=1)


def _symmetric(blocks: Tensor, *, levels: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of 16 with steps from -most to most - 1: weights are scale * step * value.

    scale [n, 1], steps float32 [n, 16], values uint8 [n, 256] with `levels` added.
    """
    columns = _columns(blocks, 16)
    fitted = scale_of(columns, levels).view(-1, 16)
    scale = _shared(peak(fitted.t()).neg_(), most)
    first = (fitted * inverse(scale)).round_().clamp_(-most, most - 1)
    steps, least = first, None
    for by in _NEARBY:
        near = (first + by).clamp_(-most, most - 1)
        step = (near * scale).view(-1)
        lost = rounded(columns, inverse(step), -levels, levels - 1).mul_(step).sub_(columns)
        error = lost.square_().sum(0).view(-1, 16)
        least, (steps,) = _better(least, error, (steps,), (near,))
    values = rounded(columns, inverse((steps * scale).view(-1)), -levels, levels - 1)
    return scale, steps, _rows(values.add_(levels))


def _affine(
    blocks: Tensor, *, group: int, highest: int, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Steps and lows from 0 to most: weights are scale * step * value - minimum * low.

    scale and minimum [n, 1], steps and lows uint8 [n, groups], values uint8 [n, 256].
    """
    columns, groups = _columns(blocks, group), 256 // group
    scales, minima = (t.view(-1, groups) for t in scale_and_minimum_of(columns, highest))
    scale = _shared(scales.amax(1), most)
    minimum = _shared(minima.amax(1), most)
    first = (scales * inverse(scale)).round_().clamp_(0, most)
    low = (minima * inverse(minimum)).round_().clamp_(0, most)
    above = columns + (low * minimum).view(-1)
    steps, lows, least = first, low, None
    for by in _NEARBY:
        near = (first + by).clamp_(0, most)
        step = (near * scale).view(-1)
        lost = rounded(above, inverse(step), 0, highest).mul_(step).sub_(columns)
        # The best minimum for these values.
        under = (lost.mean(0).view(-1, groups) * inverse(minimum)).round_().clamp_(0, most)
        error = lost.sub_((under * minimum).view(-1)).square_().sum(0).view(-1, groups)
        least, (steps, lows) = _better(least, error, (steps, lows), (near, under))
    torch.add(columns, (lows * minimum).view(-1), out=above)
    values = rounded(above, inverse((steps * scale).view(-1)), 0, highest)
    return scale, minimum, steps.to(torch.uint8), lows.to(torch.uint8), _rows(values)


def _better(
    least: Tensor | None, error: Tensor, kept: tuple[Tensor, ...], offered: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The offered tensors where their error is smaller than the least so far, else those kept."""
    if least is None:
        return error, offered
    better = error < least
    chosen = (torch.where(better, new, old) for new, old in zip(offered, kept, strict=True))
    return torch.where(better, error, least), tuple(chosen)


def _shared(furthest: Tensor, most: int) -> Tensor:
    """[n] -> [n, 1]: furthest / most in half precision, such that `most` steps reach `furthest`.

    Subnormal halves are coarse, so that the next larger one may be needed.
    """
    shared = (furthest / most).to(torch.float16).float()
    short = shared.abs() * (most + 0.5) < furthest.abs()
    shared = torch.where(short, shared + furthest.sign() * _LEAST_HALF, shared)
    return shared.unsqueeze(1)


def _six_bits(steps: Tensor, lows: Tensor) -> Tensor:
    """Eight steps and eight lows of 6 bits, uint8 [n, 8] each -> [n, 12].

    Bytes 0 to 3: the first four steps; 4 to 7: the first four lows; their upper two bits belong to
    the last four. Bytes 8 to 11: the low nibbles of the last four steps and lows.
    """
    first = steps[:, :4] | ((steps[:, 4:] >> 4) << 6)
    second = lows[:, :4] | ((lows[:, 4:] >> 4) << 6)
    third = (steps[:, 4:] & 15) | ((lows[:, 4:] & 15) << 4)
    return torch.cat([first, second, third], dim=1)


def _columns(blocks: Tensor, group: int) -> Tensor:
    """[n, 256] -> [group, n * 256 / group], contiguous."""
    return blocks.reshape(-1, group).t().contiguous()


def _rows(columns: Tensor) -> Tensor:
    """Float columns [group, groups] -> uint8 [n, 256]."""
    return columns.to(torch.uint8).t().reshape(-1, 256)
