"""Curves of one float32 element."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from runtime.kernels.triton.words import ASSEMBLY


@triton.jit
def exponential(x):
    """e^x as accurate as torch's; `tl.exp` is an approximation."""
    if ASSEMBLY:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """1 - 2 / (e^2x + 1) and near 0, where the difference has few bits, the power series."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def expm1(x):
    """e^x - 1 for x up to 0; near 0, where the difference has few bits, by the power series."""
    series = 1.0 + x * (1 / 4 + x * (1 / 20 + x * (1 / 120)))
    series = x * (1.0 + x * (1 / 2 + x * (1 / 6) * series))
    return tl.where(x > -0.3, series, tl.exp(x) - 1.0)


@triton.jit
def cosine_and_sine(x):
    """Within 1e-7 for |x| up to 2^24, since the nearest multiple of pi / 2 is subtracted in
    float64. Polynomials of S. Moshier, "Cephes"."""
    wide = x.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    rest = (wide - quarters * 1.5707963267948966).to(tl.float32)
    square = rest * rest
    series = square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    s = rest + rest * series
    series = square * (4.166664568e-2 + square * (-1.388731625e-3 + square * 2.443315712e-5))
    c = 1.0 + square * (series - 0.5)
    quadrant = quarters.to(tl.int32) & 3
    swapped = quadrant & 1 == 1
    cosine, sine = tl.where(swapped, s, c), tl.where(swapped, c, s)
    cosine = tl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)
    return cosine, tl.where(quadrant >= 2, -sine, sine)


@triton.jit
def gelu(x):
    """0.5 x (1 + tanh y) = x / (1 + e^-2y)."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gelu_erf(x):
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def softplus(x):
    """log(1 + e^x), exact where 1 + e^x is rounded; x itself above 20."""
    power = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + power
    rest = tl.where(more == 1.0, 1.0, more - 1.0)
    return tl.where(x > 20.0, x, tl.where(more == 1.0, power, tl.log(more) * (power / rest)))


@triton.jit
def curved(x, CURVE: tl.constexpr):
    """The curves of gates, by their numbers in `runtime/kernels/pointwise.py`."""
    if CURVE == 0:
        return x * sigmoid(x)
    elif CURVE == 1:
        return gelu(x)
    elif CURVE == 2:
        return gelu_erf(x)
    elif CURVE == 3:
        return x * sigmoid(1.702 * x)
    elif CURVE == 4:
        return sigmoid(x)
    elif CURVE == 5:
        positive = tl.where(x < 0.0, 0.0, x)  # NaN stays
        return positive * positive
    elif CURVE == 7:
        return tl.where(x < 0.0, 0.0, x)
    elif CURVE == 9:
        return softplus(x)
    else:
        return x


@triton.jit
def gated(pairs, dtype: tl.constexpr, CURVE: tl.constexpr):
    """float32 [..., 2], gates and values -> [...]; both are rounded to `dtype` before."""
    gate, value = tl.split(pairs.to(dtype).to(tl.float32))
    return curved(gate, CURVE) * value
