"""Kernels between products, with the sizes of an 8B model, for tests that compile them."""

import triton

from runtime.kernels.triton.attention_inputs import prepare_kernel, warps
from runtime.kernels.triton.cache_rows import BLOCK_BYTES
from runtime.kernels.triton.cache_write import ELEMENTS as WRITTEN
from runtime.kernels.triton.cache_write import write_kernel
from runtime.kernels.triton.delta import (
    CHANNELS,
    COLUMNS,
    ROWS,
    convolution_kernel,
    delta_kernel,
)
from runtime.kernels.triton.log_sums import SIZE, log_sum_kernel
from runtime.kernels.triton.moments import moments_kernel
from runtime.kernels.triton.pointwise import (
    ANGLES,
    ELEMENTS,
    add_norm_kernel,
    angles_kernel,
    gate_kernel,
    norm_kernel,
    rope_kernel,
    xielu_kernel,
)
from runtime.kernels.triton.selective_scan import CHANNELS as SCANNED
from runtime.kernels.triton.selective_scan import selective_scan_kernel
from runtime.kernels.triton.slot_tables import ROWS as LOOKED_UP
from runtime.kernels.triton.slot_tables import slot_entries_kernel
from runtime.kernels.triton.state_space import COLUMNS as STATE_COLUMNS
from runtime.kernels.triton.state_space import state_space_kernel
from runtime.kernels.triton.wkv import COLUMNS as WKV_COLUMNS
from runtime.kernels.triton.wkv import wkv7_kernel
from runtime.kv.cache_types import CacheType
from tests.cuda.compiled import Specimen

HIDDEN, HEADS, KV_HEADS, DIM = 4096, 32, 8, 128
STRIDES = ("row_stride", "part_stride", "head_stride", "gate_stride", "up_stride", "n")
INPUT_STRIDES = ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head")
RECURRENT = {
    "row_slot": "*i32", "ends": "*i32", "cells": "*i64", "result": "*bf16", "rows": "i32",
    "row_stride": "i32",
}  # fmt: skip


def norm(*, layer: bool) -> Specimen:
    return Specimen(
        norm_kernel,
        {
            "x": "*bf16", "weight": "*fp32", "bias": "*fp32", "result": "*bf16",
            "row_stride": "i32", "part_stride": "i32", "eps": "fp32",
        },
        {"PARTS": 1, "N": HIDDEN, "PADDED": HIDDEN, "LAYER": layer, "WEIGHTS": 1},
        STRIDES, warps=8, fused=False,
    )  # fmt: skip


def add_norm(*, layer: bool, planes: int = 0) -> Specimen:
    """planes: of the integers to which it is rounded."""
    pointers = dict.fromkeys(("x", "y", "result"), "*bf16") | {"weight": "*fp32", "bias": "*fp32"}
    integers = {"planes": "*i8", "scales": "*fp32", "sums": "*i32"}
    sizes = {"N": HIDDEN, "PADDED": HIDDEN, "LAYER": layer, "WEIGHTED": True, "PLANES": planes}
    return Specimen(
        add_norm_kernel,
        pointers
        | (integers if planes else {})
        | {"x_stride": "i32", "y_stride": "i32", "scale": "fp32", "eps": "fp32"},
        sizes | ({} if planes else dict.fromkeys(integers)),
        ("x_stride", "y_stride"), warps=8, fused=False,
    )  # fmt: skip


def gate(curve: int) -> Specimen:
    return Specimen(
        gate_kernel,
        {
            "gate": "*bf16", "up": "*bf16", "result": "*bf16", "n": "i32", "gate_stride": "i32",
            "up_stride": "i32", "cap": "fp32",
        },
        {"CURVE": curve, "GATED": curve < 5, "ELEMENTS": ELEMENTS},
        STRIDES,
    )  # fmt: skip


def xielu() -> Specimen:
    numbers = dict.fromkeys(("positive", "negative", "beta", "eps"), "fp32")
    return Specimen(
        xielu_kernel,
        {"x": "*bf16", "result": "*bf16", "n": "i32"} | numbers,
        {"ELEMENTS": ELEMENTS},
        ("n",),
    )


def angles(*, axes: bool) -> Specimen:
    types = {"positions": "*i64", "frequencies": "*fp32", "cos": "*fp32", "sin": "*fp32"}
    types |= {"axes": "*i64"} if axes else {}
    return Specimen(
        angles_kernel,
        types | {"tokens": "i32", "magnitude": "fp32"},
        {"PAIRS": DIM // 2, "ANGLES": ANGLES} | ({} if axes else {"axes": None}),
    )


def rope(*, halves: bool) -> Specimen:
    return Specimen(
        rope_kernel,
        {
            "x": "*bf16", "cos": "*fp32", "sin": "*fp32", "result": "*bf16", "row_stride": "i32",
            "head_stride": "i32",
        },
        {
            "HEADS": HEADS, "DIM": DIM, "HALF": DIM // 2, "HALVES": halves, "HEADS_PADDED": HEADS,
            "HALF_PADDED": DIM // 2, "REST_PADDED": 1,
        },
        STRIDES,
    )  # fmt: skip


def write(type: CacheType) -> Specimen:
    cache = _pointer(type)
    halves = "*fp16" if type.quantized else cache
    return Specimen(
        write_kernel,
        {
            "keys": "*bf16", "values": "*bf16", "stored_keys": cache, "key_halves": halves,
            "stored_values": cache, "value_halves": halves, "cells": "*i64",
            **dict.fromkeys(INPUT_STRIDES[2:], "i32"), "most": "fp32",
        },
        {
            "HEADS": KV_HEADS, "KEY_DIM": DIM, "VALUE_DIM": DIM, "BLOCK": BLOCK_BYTES[type],
            "AT_ONCE": WRITTEN,
        },
        INPUT_STRIDES,
    )  # fmt: skip


def _pointer(type: CacheType) -> str:
    return "*bf16" if type is CacheType.BFLOAT16 else "*u8"


def prepare(*, norms: int, type: CacheType = CacheType.BFLOAT16) -> Specimen:
    """norms: of queries and keys, as the constants of the kernel."""
    normed = ("query", "key", "value", "rotated_query", "rotated_key")
    floats = ("cos", "sin", *(f"{part}_weight" for part in normed))
    rows, targets = ("queries", "keys", "values", "result"), ("key_target", "value_target")
    return Specimen(
        prepare_kernel,
        {
            **dict.fromkeys(rows, "*bf16"), **dict.fromkeys(targets, _pointer(type)),
            **dict.fromkeys(floats, "*fp32"), "cells": "*i64",
            **dict.fromkeys(INPUT_STRIDES, "i32"),
            **dict.fromkeys((*(f"{part}_eps" for part in normed), "most"), "fp32"),
        },
        {
            "HEADS": HEADS, "KV_HEADS": KV_HEADS, "HEADS_PADDED": HEADS, "KV_PADDED": KV_HEADS,
            "KEY_DIM": DIM, "VALUE_DIM": DIM, "HALF": DIM // 2, "HALVES": True,
            "QUERY_NORM": norms, "KEY_NORM": norms, "VALUE_NORM": 0, "ROTATED_QUERY_NORM": 0,
            "ROTATED_KEY_NORM": 0, "TO_CELLS": True,
        },
        INPUT_STRIDES, warps=warps(HEADS * triton.next_power_of_2(DIM)),
    )  # fmt: skip


def delta(*, single: bool, decays: int = 1) -> Specimen:
    """The rule with 16 heads of keys and 32 of values, of one row a span or of many."""
    sizes = {"HEADS": 32, "KEY_HEADS": 16, "KEY_DIM": DIM, "VALUE_DIM": DIM, "KEYS_PADDED": DIM}
    return Specimen(
        delta_kernel,
        {
            "mixed": "*bf16", **dict.fromkeys(("alphas", "betas", "rates", "offsets"), "*fp32"),
            "states": "*fp32", **RECURRENT, "alpha_stride": "i32", "beta_stride": "i32",
            "query_scale": "fp32", "eps": "fp32",
        },
        sizes | {"COLUMNS": COLUMNS, "DECAYS": decays, "TILED": False, "SINGLE": single},
        STRIDES, warps=1,
    )  # fmt: skip


def convolution() -> Specimen:
    return Specimen(
        convolution_kernel,
        {
            "x": "*bf16", "weight": "*fp32", "bias": "*fp32", "states": "*fp32", **RECURRENT,
            "n": "i32",
        },
        {"TAPS": 3, "CHANNELS": CHANNELS, "ROWS": ROWS, "SINGLE": True, "CURVED": True},
        STRIDES,
    )  # fmt: skip


def space(*, single: bool) -> Specimen:
    """The state space of Granite 4.0 H Small, of one row a span or of many."""
    sizes = {"HEADS": 128, "GROUPS": 1, "KEY_DIM": DIM, "VALUE_DIM": 64, "KEYS_PADDED": DIM}
    return Specimen(
        state_space_kernel,
        {
            **dict.fromkeys(("mixed", "steps"), "*bf16"),
            **dict.fromkeys(("rates", "offsets", "skips", "states"), "*fp32"), **RECURRENT,
            "step_stride": "i32",
        },
        sizes | {"COLUMNS": STATE_COLUMNS, "SINGLE": single},
        (*STRIDES, "step_stride"), warps=1,
    )  # fmt: skip


def scan(*, single: bool) -> Specimen:
    """The scan of Jamba 1.5 Mini, of one row a span or of many."""
    strides = tuple(f"{name}_stride" for name in ("value", "step", "key", "query"))
    inputs = {name: kind for name, kind in RECURRENT.items() if name != "row_stride"}
    return Specimen(
        selective_scan_kernel,
        {
            **dict.fromkeys(("values", "steps", "keys", "queries"), "*bf16"),
            **dict.fromkeys(("rates", "offsets", "skips", "states"), "*fp32"), **inputs,
            **dict.fromkeys(strides, "i32"),
        },
        {
            "COUNT": 8192, "SIZE": 16, "PADDED": 16, "CHANNELS": SCANNED, "SINGLE": single,
        },
        strides, warps=1,
    )  # fmt: skip


def wkv(*, single: bool) -> Specimen:
    """The recurrence of RWKV 7 2.9B, of one row a span or of many."""
    strides = tuple(f"{name}_stride" for name in ("query", "decay", "key", "value", "rate"))
    inputs = {
        name: kind for name, kind in RECURRENT.items() if name not in ("result", "row_stride")
    }
    return Specimen(
        wkv7_kernel,
        {
            **dict.fromkeys(("queries", "keys", "values", "answers", "own"), "*bf16"),
            **dict.fromkeys(
                ("decays", "rates", "removed", "added", "own_factors", "states"), "*fp32"
            ),
            **inputs, **dict.fromkeys(strides, "i32"),
            **dict.fromkeys(("least_log", "least_length"), "fp32"),
        },
        {"HEADS": 40, "SIZE": 64, "PADDED": 64, "COLUMNS": WKV_COLUMNS, "SINGLE": single},
        strides, warps=1,
    )  # fmt: skip


def moments() -> Specimen:
    types = {"x": "*bf16", "means": "*fp32", "deviations": "*fp32", "row_stride": "i32"}
    return Specimen(
        moments_kernel, types, {"N": HIDDEN, "PADDED": HIDDEN}, ("row_stride",), warps=8
    )


def log_sum() -> Specimen:
    types = {"logits": "*fp32", "result": "*fp32", "vocab": "i32", "row_stride": "i32"}
    return Specimen(log_sum_kernel, types, {"SIZE": SIZE}, ("vocab", "row_stride"), warps=8)


def slot_entries(page_tokens: int) -> Specimen:
    types = {"table": "*i32", "slots": "*i32", "indices": "*i64", "entries": "*i64"}
    return Specimen(
        slot_entries_kernel,
        types | {"rows": "i32", "length": "i32"},
        {"PAGE_TOKENS": page_tokens, "ROWS": LOOKED_UP},
        ("rows", "length"),
    )


def specimens(capability: int) -> dict[str, Specimen]:
    return {
        "rms norm": norm(layer=False),
        "layer norm": norm(layer=True),
        "rms norm of a sum": add_norm(layer=False),
        "layer norm of a sum": add_norm(layer=True),
        "rms norm of a sum, rounded": add_norm(layer=False, planes=2),
        "silu gate": gate(0),
        "gelu erf gate": gate(2),
        "squared relu": gate(5),
        "softcap": gate(7),
        "xielu": xielu(),
        "moments of rows": moments(),
        "logarithm of a sum": log_sum(),
        "tokens of rows": slot_entries(1),
        "cells of rows": slot_entries(64),
        "angles of rows": angles(axes=False),
        "angles of rows, three axes": angles(axes=True),
        "rope halves": rope(halves=True),
        "rope interleaved": rope(halves=False),
        "write bfloat16": write(CacheType.BFLOAT16),
        "write fp8": write(CacheType.FP8),
        "write q8_0": write(CacheType.Q8_0),
        "write q4_0": write(CacheType.Q4_0),
        "norms, rope, write": prepare(norms=2),
        "norms, rope, write fp8": prepare(norms=2, type=CacheType.FP8),
        "rope, write": prepare(norms=0),
        "convolution": convolution(),
        "delta rule, a row": delta(single=True),
        "delta rule, rows": delta(single=False),
        "delta rule of elements, rows": delta(single=False, decays=DIM),
        "wkv7, a row": wkv(single=True),
        "wkv7, rows": wkv(single=False),
        "selective scan, a row": scan(single=True),
        "selective scan, rows": scan(single=False),
        "state space, a row": space(single=True),
        "state space, rows": space(single=False),
    }
