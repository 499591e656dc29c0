"""What `test_draws.py` compiles: draws among 128,256 tokens, greedy and of the 40 most likely."""

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


def specimens(capability: int) -> dict[str, Specimen]:
    found = {}
    for most in (1, 64, 256):
        sizes = {"MOST": most, "BLOCK": BLOCK}
        found[f"rank {most}"] = Specimen(rank_kernel, _RANK, sizes, ("row_stride",), 8)
        sizes = {"MOST": most, "BLOCKS": 16}
        warps = max(1, min(8, most * 16 // 256))
        found[f"draw {most}"] = Specimen(draw_kernel, _DRAW, sizes, (), warps)
    return found
