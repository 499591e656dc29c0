"""Kernels of the choice of tokens that `test_token_choice.py` compiles, with sizes of DeepSeek V3.2
and GLM-5, and of MiniMax M3."""

from runtime.kernels.triton.cache_rows import BLOCK_BYTES
from runtime.kernels.triton.token_choice import (
    BLOCK,
    LEAST,
    SCORED,
    TILE,
    block_kernel,
    choose_kernel,
    score_kernel,
)
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
    found["scores of heads"] = _scores(CacheType.BFLOAT16, heads=4)
    found["choice"] = _choice(most=2048)
    found["choice of blocks"] = _choice(most=16, heads=4, tokens=128)
    found["blocks"] = Specimen(
        block_kernel,
        {"scores": "*fp32", "begins": "*i32", "ends": "*i32", "of_blocks": "*fp32"}
        | dict.fromkeys(("first_row", "capacity", "blocks"), "i32"),
        {"CHOICES": 4, "LOCAL": 1, "TOKENS": 128, "WIDTH": 128, "BLOCKS": BLOCK // 128},
        ("capacity",),
    )
    return found


def _choice(*, most: int, heads: int = 1, tokens: int = 1) -> Specimen:
    return Specimen(
        choose_kernel,
        {"scores": "*fp32", "page_table": "*i32"}
        | _SEEN
        | {"cells": "*i32", "limits": "*i32"}
        | dict.fromkeys(("first_row", "choices", "blocks", "table_stride"), "i32"),
        {
            "MOST": most, "CHOICES": heads, "TOKENS": tokens, "WIDTH": most * tokens,
            "PAGE_TOKENS": 16, "BLOCK": BLOCK,
        },
        ("table_stride",) if tokens > 1 else ("blocks", "table_stride"),
        warps=8,
    )  # fmt: skip


def _scores(type: CacheType, *, heads: int | None = None) -> Specimen:
    """heads: those that each make a choice; None for weighted ones."""
    keys, halves = _POINTERS[type]
    return Specimen(
        score_kernel,
        {"queries": "*bf16", "weights": "*bf16", "keys": keys, "key_halves": halves}
        | {"page_table": "*i32"}
        | _SEEN
        | {"scores": "*fp32"}
        | dict.fromkeys(("first_row", "capacity", "table_stride", "weight_stride"), "i32"),
        {
            "HEADS": heads or 64, "WEIGHTED": heads is None, "DIM": 128, "WIDTH": 128,
            "M": LEAST if heads else TILE, "N": TILE, "SCORED": SCORED, "PAGE_TOKENS": 16,
            "BLOCK": BLOCK_BYTES[type],
        },
        ("capacity", "table_stride", "weight_stride"),
    )  # fmt: skip
