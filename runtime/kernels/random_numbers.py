"""Random numbers that depend on a seed and a position only."""

from torch import Tensor

from runtime.int64 import signed


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions [n] int64 -> [n] float64 in [0, 1), a multiple of 2**-53.

    Output number `position` of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", 2014), whose initial state is the mixed seed.
    """
    state = _mixed(seeds + _GOLDEN) + (positions + 1) * _GOLDEN
    return _shifted(_mixed(state), 11).double() * 2.0**-53


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(state: Tensor) -> Tensor:
    """The finaliser of splitmix64, on wrapping int64."""
    state = (state ^ _shifted(state, 30)) * signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


_GOLDEN = signed(0x9E3779B97F4A7C15)
