"""As `runtime.kernels.random_numbers`."""

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position):
    """float64 as of `uniforms`."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    state = _mixed(seed.to(tl.uint64) + golden)
    state = _mixed(state + (position.to(tl.uint64) + 1) * golden)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mixed(state):
    """The finaliser of splitmix64."""
    first: tl.constexpr = 0xBF58476D1CE4E5B9
    second: tl.constexpr = 0x94D049BB133111EB
    state = (state ^ (state >> 30)) * first
    state = (state ^ (state >> 27)) * second
    return state ^ (state >> 31)
