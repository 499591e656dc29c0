"""Kernels that `test_selection.py` compiles."""

from runtime.kernels.triton.selection import highest_kernel
from tests.cuda.compiled import Specimen


def specimens(capability: int) -> dict[str, Specimen]:
    experts = Specimen(
        highest_kernel,
        {"values": "*fp32", "result": "*i64", "n": "i32"},
        {"COUNT": 8, "PADDED": 128},
        ("n",),
    )
    return {"128 experts": experts}
