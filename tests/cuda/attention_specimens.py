"""Kernels of paged attention for tests that compile them: head sizes and caches of real models."""

from dataclasses import replace

import torch

from runtime.kernels.triton.attention import Shape
from runtime.kernels.triton.attention_kernels import decode_kernel, merge_kernel, prefill_kernel
from runtime.kernels.triton.launch import tensor_cores_of
from runtime.kv.cache_types import CacheType
from tests.cuda.compiled import Specimen

POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.float8_e4m3fn: "*u8",
}  # fmt: skip
BF16 = torch.bfloat16


def shape(
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    type: CacheType = CacheType.BFLOAT16,
    **options: bool,
) -> Shape:
    dtype = torch.float32 if type is CacheType.FLOAT32 else BF16
    return Shape(heads, kv_heads, key_dim, value_dim or key_dim, 16, type, dtype, **options)


SHAPES = {
    "8B": shape(32, 8, 128),
    "8B, q8_0": shape(32, 8, 128, type=CacheType.Q8_0),
    "8B, q4_0": shape(32, 8, 128, type=CacheType.Q4_0),
    "8B, fp8": shape(32, 8, 128, type=CacheType.FP8),
    "8B, float16": shape(32, 8, 128, type=CacheType.FLOAT16),
    "8B, float32": shape(32, 8, 128, type=CacheType.FLOAT32),
    "64, sinks": shape(64, 8, 64, sinks=True),
    "64, distances": shape(12, 12, 64, distances=True),
    "80": shape(32, 32, 80),
    "96": shape(32, 32, 96),
    "192/128": shape(16, 16, 192, 128),
    "32 heads, q4_0": shape(32, 32, 128, type=CacheType.Q4_0),
    "256, capped": shape(16, 8, 256, capped=True),
    "256, q8_0": shape(16, 8, 256, type=CacheType.Q8_0),
    "256, q4_0": shape(16, 8, 256, type=CacheType.Q4_0),
    "512": shape(8, 1, 512),
    "576/512": shape(128, 1, 576, 512, values_in_keys=True),
    "512, float32": shape(8, 1, 512, type=CacheType.FLOAT32),
    "576/512, float32": shape(128, 1, 576, 512, CacheType.FLOAT32, values_in_keys=True),
    "576/512, cache in float32": replace(
        shape(128, 1, 576, 512, CacheType.FLOAT32, values_in_keys=True), dtype=torch.bfloat16
    ),
    "576/512, float32, cache in q8_0": replace(
        shape(128, 1, 576, 512, CacheType.Q8_0, values_in_keys=True), dtype=torch.float32
    ),
}


def shapes(capability: int) -> dict[str, Shape]:
    """For a kind of device."""
    of = tensor_cores_of(divmod(capability, 10))
    return {name: replace(shape, tensor_cores=of) for name, shape in SHAPES.items()}


def decode(shape: Shape, *, whole: int = 2) -> Specimen:
    """whole: WHOLE of the kernel."""
    options = shape.decode_options
    return _reading(
        decode_kernel, shape, options | {"MIXED": True, "WHOLE": whole},
        {"states": "*fp32", "sums": "*fp32", "parts": "i32", "most_whole": "i32"},
    )  # fmt: skip


def prefill(shape: Shape) -> Specimen:
    return _reading(prefill_kernel, shape, shape.prefill_options, {"end_row": "i32"})


def merge(shape: Shape, *, planes: int = 0) -> Specimen:
    """planes: of the integers to which the result is rounded."""
    integers = {"planes": "*i8", "scales": "*fp32", "plane_sums": "*i32"}
    options = shape.merge_options | {
        "MIXED": not planes,
        "PLANES": planes,
        "WHOLE": int(not planes),
    }
    options |= {} if planes else dict.fromkeys(integers)
    types = (integers if planes else {}) | {
        "row_slot": "*i32", "begins": "*i32", "ends": "*i32", "sinks": "*fp32",
        "states": "*fp32", "sums": "*fp32", "result": POINTERS[shape.dtype],
        "first_row": "i32", "rows": "i32", "most_whole": "i32",
    }  # fmt: skip
    return _specimen(merge_kernel, types, options, fused=False)


def _reading(kernel, shape: Shape, options: dict, types: dict[str, str]) -> Specimen:
    cache = "*u8" if shape.type.quantized else POINTERS[shape.type.dtype]
    halves = "*fp16" if shape.type.quantized else cache
    types = types | {
        "queries": POINTERS[shape.dtype], "keys": cache, "key_halves": halves, "values": cache,
        "value_halves": halves, "page_table": "*i32", "row_slot": "*i32", "begins": "*i32",
        "ends": "*i32", "sinks": "*fp32", "slopes": "*fp32", "positions": "*i64",
        "result": POINTERS[shape.dtype], "first_row": "i32", "rows": "i32", "row_stride": "i32",
        "head_stride": "i32", "table_stride": "i32", "inner": "fp32", "outer": "fp32",
    }  # fmt: skip
    return _specimen(kernel, types, options)


def _specimen(kernel, types: dict[str, str], options: dict, *, fused: bool = True) -> Specimen:
    constants = {name: options[name] for name in kernel.arg_names if name in options}
    return Specimen(
        kernel, types, constants, multiples=("row_stride", "head_stride"),
        warps=options["num_warps"], stages=options.get("num_stages", 3),
        most_registers=options.get("maxnreg"), fused=fused,
    )  # fmt: skip


def specimens(capability: int) -> dict[str, Specimen]:
    found = shapes(capability)
    return {
        "decode": decode(found["8B"]),
        "decode in parts": decode(found["8B"], whole=0),
        "decode long rows in parts": decode(found["8B"], whole=1),
        "decode q8_0, long rows in parts": decode(found["8B, q8_0"], whole=1),
        "merge": merge(found["8B"]),
        "merge and round": merge(found["8B"], planes=2),
        "decode fp8": decode(found["8B, fp8"]),
        "decode q8_0": decode(found["8B, q8_0"]),
        "decode q4_0": decode(found["8B, q4_0"]),
        "prefill": prefill(found["8B"]),
        "prefill fp8": prefill(found["8B, fp8"]),
    }
