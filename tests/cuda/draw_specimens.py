"""Kernels that `test_draws.py` compiles: draws among 128,256 tokens, greedy, by top_k, and among
all tokens."""

from collections.abc import Mapping
from typing import Any

from runtime.kernels.triton import repetitions, thresholds
from runtime.kernels.triton.draws import BLOCK, draw_kernel, rank_kernel
from tests.cuda.compiled import Specimen

_RANK = {"logits": "*fp32", "slots": "*i64", "ints": "*i64", "ranks": "*i64"} | dict.fromkeys(
    ("vocab", "row_stride", "greedy", "int_columns"), "i32"
)
_DRAW = {
    **dict.fromkeys(("ranks", "slots", "positions", "ints", "tokens"), "*i64"),
    "floats": "*fp32", "history": "*i32", "finite": "*i1",
    **dict.fromkeys(
        ("blocks", "history_stride", "greedy", "vocab", "float_columns", "int_columns"), "i32"
    ),
}  # fmt: skip
_ALL = {
    **dict.fromkeys(("slots", "positions", "ints", "tokens", "sums", "tables"), "*i64"),
    **dict.fromkeys(("logits", "floats", "lows"), "*fp32"),
    "peaks": "*i32", "candidates": "*i32", "history": "*i32", "finite": "*i1",
    **dict.fromkeys(
        ("blocks", "vocab", "row_stride", "history_stride", "ordered", "float_columns",
         "int_columns"), "i32",
    ),
}  # fmt: skip
_REPETITIONS = {
    **dict.fromkeys(("rows", "slots", "positions", "ints"), "*i64"),
    "floats": "*fp32",
    **dict.fromkeys(("history", "breakers", "penalties"), "*i32"),
    **dict.fromkeys(("vocab", "history_stride", "breakers_stride"), "i32"),
}


def specimens(capability: int) -> dict[str, Specimen]:
    found = {}
    for most in (1, 64, 256):
        sizes = {"MOST": most, "BLOCK": BLOCK}
        found[f"rank {most}"] = Specimen(rank_kernel, _RANK, sizes, ("row_stride",), 8)
        sizes = {"MOST": most, "BLOCKS": 16}
        warps = max(1, min(8, most * 16 // 256))
        found[f"draw {most}"] = Specimen(draw_kernel, _DRAW, sizes, (), warps, fused=False)
    sizes = {"BLOCK": thresholds.BLOCK, "BUCKETS": thresholds.BUCKETS}
    found["extent"] = _of_all(thresholds.extent_kernel, 8, sizes, fused=True)
    sizes["BLOCKS"] = 32
    found["weights"] = _of_all(thresholds.weight_kernel, 8, sizes, fused=False)
    sizes = {**sizes, "TILE": thresholds.TILE}
    found["threshold"] = _of_all(thresholds.threshold_kernel, 16, sizes, fused=False)
    found["repetitions"] = Specimen(
        repetitions.repetition_kernel, _REPETITIONS, {"COLUMNS": repetitions.COLUMNS},
        ("vocab", "history_stride"),
    )  # fmt: skip
    found["subtraction"] = Specimen(
        repetitions.subtraction_kernel,
        {"rows": "*i64", "penalties": "*fp32", "logits": "*fp32", "vocab": "i32",
         "row_stride": "i32"},
        {"BLOCK": repetitions.BLOCK}, ("vocab", "row_stride"), 8,
    )  # fmt: skip
    return found


def _of_all(kernel: Any, warps: int, sizes: Mapping[str, object], *, fused: bool) -> Specimen:
    types = {name: type for name, type in _ALL.items() if name in kernel.arg_names}
    return Specimen(kernel, types, dict(sizes), ("row_stride", "vocab"), warps, fused=fused)
