"""The build of llama.cpp has the instruction sets that this engine uses."""

import pytest

from bench.machine import check_peer
from runtime.kernels.cpu_levels import LEVELS

AVX2 = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | OPENMP = 1 | "
BF16 = AVX2 + "AVX512 = 1 | AVX512_VBMI = 1 | AVX512_VNNI = 1 | AVX512_BF16 = 1 | "
LEVEL = {level.name: level for level in LEVELS}


@pytest.mark.parametrize(
    ("level", "info", "missing"),
    [
        ("x86-64-v3", AVX2, None),
        ("x86-64-v3", AVX2.replace("FMA = 1", "FMA = 0"), "FMA"),
        ("x86-64-v3-vnni", AVX2, "AVX_VNNI"),
        ("x86-64-v4-vnni", AVX2, "AVX512, AVX512_VNNI"),
        ("x86-64-v4-bf16", BF16, None),
        ("x86-64-v4-amx", BF16, "AMX_INT8"),
        ("x86-64-v4-amx", f"{BF16}AMX_INT8 = 1 | ", None),
        ("arm64-dotprod", "CPU : NEON = 1 | ", None),
    ],
)
def test_a_build_that_lacks_what_this_engine_uses_is_refused(level, info, missing) -> None:
    if missing is None:
        check_peer(info, LEVEL[level])
    else:
        with pytest.raises(SystemExit, match=f"without {missing}, which"):
            check_peer(info, LEVEL[level])
