"""What `Compute.AUTO` means on a CPU, depending on its kernels and on the type of a file's weights.

FINE is the default. Where it does not reach the speed that was set as a goal beside llama.cpp, and
FAST does, AUTO is FAST: see "Rows in tiles" in bench/NOTES.md for the measurements.
"""

from collections.abc import Mapping
from types import MappingProxyType

from runtime.kernels import native
from runtime.quant.weight import Compute

_AVX2 = frozenset({"Q4_K", "Q5_K", "Q6_K"})
_AVX2_VNNI = _AVX2 | {"IQ4_XS"}  # FINE is slower than without VNNI
_AVX512_VNNI = frozenset({"Q5_K", "Q6_K", "IQ4_XS"})
# By the level of the kernels, of all levels that have products with integers: types of most weights
# of a file whose products are FAST.
FAST_TYPES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "x86-64-v3": _AVX2,
        "x86-64-v3-vnni": _AVX2_VNNI,
        "x86-64-v4": _AVX2,  # without VNNI, integers are multiplied as with AVX2
        "x86-64-v4-vnni": _AVX512_VNNI,
        "x86-64-v4-bf16": _AVX512_VNNI,
        "x86-64-v4-amx": frozenset(),
        "arm64-dotprod": frozenset(),  # not measured
    }
)


def on_this_cpu(compute: Compute, main_type: str) -> Compute:
    """How all weights of a file are computed here; AUTO remains where kernels decide by the type of
    each weight. `main_type`: the block type of most weights of the file."""
    fast = compute is Compute.AUTO and main_type in FAST_TYPES.get(native.kernel_level(), ())
    return Compute.FAST if fast else compute
