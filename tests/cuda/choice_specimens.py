"""Kernels of the choice of tokens that `test_token_choice.py` compiles, with sizes of DeepSeek V3.2
and GLM-5."""

from runtime.kernels.triton.cache_rows import BLOCK_BYTES
from runtime.kernels.triton.token_choice import BLOCK, SCORED, TILE, choose_kernel, score_kernel
from runtime.kv.cache_types import CacheType
from tests.cuda.compiled import Specimen

_POINTERS = {
    CacheType.BFLOAT16: ("*bf16", "*bf16"),
    CacheType.FP8: ("*u8", "*u8"),
    CacheType.Q8_0: ("*u8", "*fp16"),
    CacheType.Q4_0: ("*u8", "*fp16"),
}
_SEEN = {"row_slot": "*i32", "begins": "*i32", "ends": "*i32"}


def specimens(capability: int) -> dict[str, Specimen]:
    found = {f"scores, {type.name}": _scores(type) for type in _POINTERS}
    choice = Specimen(
        choose_kernel,
        {"scores": "*fp32", "page_table": "*i32"}
        | _SEEN
        | {"cells": "*i32", "limits": "*i32"}
        | dict.fromkeys(("first_row", "rows", "capacity", "table_stride"), "i32"),
        {"MOST": 2048, "PAGE_TOKENS": 16, "BLOCK": BLOCK},
        ("capacity", "table_stride"),
        warps=8,
    )
    return found | {"choice": choice}


def _scores(type: CacheType) -> Specimen:
    keys, halves = _POINTERS[type]
    return Specimen(
        score_kernel,
        {"queries": "*bf16", "weights": "*bf16", "keys": keys, "key_halves": halves}
        | {"page_table": "*i32"}
        | _SEEN
        | {"scores": "*fp32"}
        | dict.fromkeys(("first_row", "capacity", "table_stride", "weight_stride"), "i32"),
        {
            "HEADS": 64, "DIM": 128, "WIDTH": 128, "M": TILE, "N": TILE, "SCORED": SCORED,
            "PAGE_TOKENS": 16, "BLOCK": BLOCK_BYTES[type],
        },
        ("capacity", "table_stride", "weight_stride"),
    )  # fmt: skip
