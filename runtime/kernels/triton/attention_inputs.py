"""Norms and rotations of heads and the write to the cache on CUDA devices, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.attention_inputs import HeadNorm, HeadNorms, HeadRotation
from runtime.kernels.cache_rows import RANGES
from runtime.kernels.triton.cache_rows import kernel_pages
from runtime.kernels.triton.cache_write import as_stored, write_cache
from runtime.kernels.triton.launch import launch, next_power, with_adjacent_elements
from runtime.kernels.triton.overlap import wait_for_previous
from runtime.kernels.triton.pointwise import load_pairs, store_pairs
from runtime.worker.model import AttentionPlan, LayerPages


@triton.jit
def _normed(
    a, b, rest, weight, eps, first, second, others, in_half, in_rest,
    DIM: tl.constexpr, HALF: tl.constexpr, RESTS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """RMS norm of heads, given and returned in parts [heads, n]."""
    square = 0.0
    if HALF > 0:
        square += tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if RESTS > 0:
        square += tl.sum(rest * rest, 1)
    factor = tl.math.rsqrt(square / DIM + eps)[:, None]
    a, b, rest = a * factor, b * factor, rest * factor
    if WEIGHTED:
        if HALF > 0:
            a *= tl.load(weight + first, mask=in_half, other=0.0).to(tl.float32)[None, :]
            b *= tl.load(weight + second, mask=in_half, other=0.0).to(tl.float32)[None, :]
        if RESTS > 0:
            rest *= tl.load(weight + others, mask=in_rest, other=0.0).to(tl.float32)[None, :]
    return a, b, rest


@triton.jit
def _prepare(
    x, cos, sin, weight, rotated_weight, target, token, row, row_stride, head_stride, eps,
    rotated_eps, most,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HALVES: tl.constexpr, NORM: tl.constexpr, ROTATED_NORM: tl.constexpr,
):  # fmt: skip
    """Prepare all heads of a token and store them in a row of the target.

    NORM, ROTATED_NORM: 0 for no norm, 1 for one without weights, 2 with weights. A head has two
    parts of HALF elements, which are rotated, and the rest.
    """
    RESTS: tl.constexpr = DIM - 2 * HALF
    PAIRS: tl.constexpr = triton.next_power_of_2(HALF) if HALF > 0 else 1
    head = tl.arange(0, PADDED)
    pair = tl.arange(0, PAIRS)
    others = 2 * HALF + tl.arange(0, triton.next_power_of_2(RESTS) if RESTS > 0 else 1)
    first, second = (pair, pair + HALF) if HALVES else (2 * pair, 2 * pair + 1)
    in_half, in_rest = pair < HALF, others < DIM
    source = x + token * row_stride + head[:, None] * head_stride
    target += (row * HEADS + head[:, None]) * DIM
    exists = (head < HEADS)[:, None]
    rests = exists & in_rest[None, :]
    a, b = load_pairs(source, exists, HALF, PAIRS, HALVES)
    rest = tl.load(source + others[None, :], mask=rests, other=0.0).to(tl.float32)
    if NORM > 0:
        a, b, rest = _normed(
            a, b, rest, weight, eps, first, second, others, in_half, in_rest, DIM, HALF, RESTS,
            NORM > 1,
        )  # fmt: skip
    if HALF > 0:
        c = tl.load(cos + token * HALF + pair, mask=in_half, other=0.0)[None, :]
        s = tl.load(sin + token * HALF + pair, mask=in_half, other=0.0)[None, :]
        a, b = a * c - b * s, a * s + b * c
    if ROTATED_NORM > 0:
        a, b, rest = _normed(
            a, b, rest, rotated_weight, rotated_eps, first, second, others, in_half, in_rest, DIM,
            HALF, RESTS, ROTATED_NORM > 1,
        )  # fmt: skip
    type = target.dtype.element_ty
    if HALF > 0:
        a, b = as_stored(a, most, type), as_stored(b, most, type)
        store_pairs(target, exists, a, b, HALF, PAIRS, HALVES)
    if RESTS > 0:
        tl.store(target + others[None, :], as_stored(rest, most, type), mask=rests)


@triton.jit
def prepare_kernel(
    queries, keys, values, cos, sin, query_weight, key_weight, value_weight, rotated_query_weight,
    rotated_key_weight, result, key_target, value_target, cells,
    query_row, query_head, key_row, key_head, value_row, value_head,
    query_eps, key_eps, value_eps, rotated_query_eps, rotated_key_eps, most,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr,
    HALVES: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr, ROTATED_QUERY_NORM: tl.constexpr, ROTATED_KEY_NORM: tl.constexpr,
    TO_CELLS: tl.constexpr,
):  # fmt: skip
    """Grid: tokens x (queries, keys, values). TO_CELLS: keys and values go to rows `cells`."""
    wait_for_previous()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token
    if part == 0:
        _prepare(
            queries, cos, sin, query_weight, rotated_query_weight, result, token, row, query_row,
            query_head, query_eps, rotated_query_eps, float("inf"), HEADS, HEADS_PADDED, KEY_DIM,
            HALF, HALVES, QUERY_NORM, ROTATED_QUERY_NORM,
        )  # fmt: skip
    else:
        if TO_CELLS:
            row = tl.load(cells + token)
        if part == 1:
            _prepare(
                keys, cos, sin, key_weight, rotated_key_weight, key_target, token, row, key_row,
                key_head, key_eps, rotated_key_eps, most, KV_HEADS, KV_PADDED, KEY_DIM, HALF,
                HALVES, KEY_NORM, ROTATED_KEY_NORM,
            )  # fmt: skip
        else:
            _prepare(
                values, cos, sin, value_weight, value_weight, value_target, token, row, value_row,
                value_head, value_eps, value_eps, most, KV_HEADS, KV_PADDED, VALUE_DIM, 0, HALVES,
                VALUE_NORM, 0,
            )  # fmt: skip


def prepare_attention(
    queries: Tensor,
    stored: tuple[Tensor, Tensor] | None,
    norms: HeadNorms,
    rotation: HeadRotation | None,
    pages: LayerPages,
    plan: AttentionPlan,
) -> Tensor:
    """As `runtime.kernels.attention_inputs.prepare_attention`."""
    queries = with_adjacent_elements(queries)
    keys, values = (queries, queries) if stored is None else map(with_adjacent_elements, stored)
    result = queries.new_empty(queries.shape)
    targets, to_cells = kernel_pages(pages)[::2], stored is not None
    if stored is not None and pages.type.quantized:
        targets, to_cells = (keys.new_empty(keys.shape), values.new_empty(values.shape)), False
    (tokens, heads, key_dim), (kv_heads, value_dim) = queries.shape, values.shape[1:]
    cos = sin = None
    if rotation is not None:
        cos, sin = rotation.cos.float().contiguous(), rotation.sin.float().contiguous()
    options = {
        "HEADS": heads, "KV_HEADS": kv_heads, "HEADS_PADDED": next_power(heads),
        "KV_PADDED": next_power(kv_heads), "KEY_DIM": key_dim, "VALUE_DIM": value_dim,
        "HALF": 0 if cos is None else cos.shape[1],
        "HALVES": rotation is not None and rotation.halves,
        "QUERY_NORM": _kind(norms.query), "KEY_NORM": _kind(norms.key),
        "VALUE_NORM": _kind(norms.value), "ROTATED_QUERY_NORM": _kind(norms.rotated_query),
        "ROTATED_KEY_NORM": _kind(norms.rotated_key), "TO_CELLS": to_cells,
    }  # fmt: skip
    every = norms.query, norms.key, norms.value, norms.rotated_query, norms.rotated_key
    launch(
        prepare_kernel, (tokens, 1 if stored is None else 3), queries, keys, values, cos, sin,
        *(None if norm is None else norm.weight for norm in every), result, *targets,
        plan.write_cell, *queries.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        *(0.0 if norm is None else norm.eps for norm in every),
        RANGES.get(pages.type, float("inf")), **options,
        num_warps=warps(heads * key_dim), device=queries.device, overlaps=True,
    )  # fmt: skip
    if stored is not None and not to_cells:
        write_cache(*targets, pages, plan)
    return result


def warps(elements: int) -> int:
    """Number of warps of a tile that stays in registers: some 32 elements per thread."""
    return int(min(16, max(1, next_power(elements) // 1024)))


def _kind(norm: HeadNorm | None) -> int:
    """NORM of `_prepare`: 0 for no norm, 1 for one without weights, 2 with weights."""
    return 0 if norm is None else 1 if norm.weight is None else 2
