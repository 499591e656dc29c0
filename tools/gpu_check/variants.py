"""Measures kernels with other tiles, warps and stages than they are launched with, to choose them.

Kernels are compiled before, by processes side by side, because that takes longer than to measure.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bench.make_model import Shape
from runtime.kernels.attention import Scoring
from runtime.kernels.triton import (
    attention,
    fragments,
    launch,
    products,
    tiles,
    vector,
    wide_tiles,
)
from runtime.kernels.triton.pointwise import gate
from runtime.kv.cache_types import CacheType
from runtime.quant.block_types import block_type
from runtime.quant.weight import Compute, Weight
from runtime.worker.model import AttentionPlan, LayerPages, RowSpan
from serve_app.child_process import end_with_parent
from tests.cuda.large_model import SHAPE
from tests.kernels.random_weights import random_weight
from tools.gpu_check import speed
from tools.gpu_check.ceilings import recorded_seconds
from tools.gpu_check.products import silu_curve
from tools.gpu_check.report import Task

_ROTATED_BYTES = 200 << 20  # of copies of a matrix, more than caches hold
_PAGE_TOKENS = 16
_TOLERANCE = 2e-2  # of the largest number, in bfloat16
# Rows of tiles, and (outputs, groups, warps, stages) of each. One stage: no asynchronous copies.
_TILES = {128: ((128, 2, 8, 3), (64, 4, 8, 3), (128, 2, 8, 1))}
# Rows of fragments; their outputs and warps.
_FRAGMENT_ROWS, _FRAGMENTS = (8, 16, 32, 64), tuple(product((16, 32), (2, 4, 8)))
# Rows of products by wide tiles; the rows and outputs of those tiles.
_WIDE_ROWS = (128, 256)
_WIDE_TILES = ((128, 128), (128, 64), (64, 256), (256, 128), (128, 256))
# Sequences and their tokens; then rows of a prompt and its tokens.
_DECODING = ((1, 1024), (1, 8192), (8, 1024), (64, 1024), (256, 1024))
_PROMPTS = ((512, 512), (2048, 2048), (2048, 8192))
# Tokens of the sequences of a step, where one may be much longer than the others; least parts.
_UNEVEN = {"64 of 1,024": (1024,) * 64, "63 of 1,024, 1 of 65,536": (1024,) * 63 + (65_536,)}
_LEAST_PARTS = (1, 2, 4, 8, 16)


Products = Sequence[Callable[[Tensor], Tensor]]
Draw = Callable[[int], Tensor]  # so many rows of inputs


@dataclass(frozen=True)
class Case:
    """calls: the same work on different memory, in turn; patched(): what is changed meanwhile."""

    name: str
    calls: Sequence[Callable[[], Tensor]]
    patched: Callable[[], AbstractContextManager[object]]


def run(task: Task) -> None:
    if not task.dry:
        _compile_all()
    cases = _cases(task.device, dry=task.dry, copies=_ROTATED_BYTES)
    task.make((case.name, partial(_measure, task, case)) for case in cases)


def _measure(task: Task, case: Case) -> None:
    expected = case.calls[0]()
    with case.patched():
        got = case.calls[0]()
        taken = recorded_seconds(case.calls, task.device)
    error = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    task.report.check(case.name, error.item() <= _TOLERANCE, error=error.item())
    task.report.figure(case.name, taken * 1e6, "µs")


def _compile_all() -> None:
    parts = os.cpu_count() or 1
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parts, mp_context=spawned, initializer=end_with_parent) as pool:
        list(pool.map(_compile, range(parts), [parts] * parts))


def _compile(part: int, parts: int) -> None:
    """Compiles the kernels of every n-th case. A variant that does not compile fails later."""

    def compiled(
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[object, ...],
        options: dict[str, object],
        device: torch.device,
    ) -> None:
        kernel.warmup(*arguments, grid=grid, **options)

    device = torch.device("cuda", torch.cuda.current_device())
    for number, case in enumerate(_cases(device, dry=False, copies=1)):
        if number % parts == part:
            with case.patched(), patch.object(launch, "start", compiled), suppress(Exception):
                case.calls[0]()


def _cases(device: torch.device, *, dry: bool, copies: int) -> Iterator[Case]:
    """copies: bytes of copies of a matrix."""
    dtype = torch.float32 if dry else torch.bfloat16
    for name, type, size, gated in _matrices(dry=dry):
        weight = replace(random_weight(block_type(type), *size), compute=Compute.FINE)
        first = weight.in_planes(device)
        count = max(1, min(16, copies // first.nbytes))
        ring = [first, *(replace(first, data=first.data.clone()) for _ in range(count - 1))]

        def draw(rows: int, inputs: int = size[1]) -> Tensor:
            return torch.randn(rows, inputs, device=device, dtype=dtype)

        vectors = [partial(_by_vectors, weight, gated) for weight in ring]
        yield from _vectors(f"{name} {type}", vectors, draw, dry=dry)
        by_fragments = [partial(_by_fragments, weight, gated) for weight in ring]
        yield from _fragments(f"{name} {type}", by_fragments, draw, dry=dry)
        by_tiles = [partial(_by_tiles, weight, gated) for weight in ring]
        yield from _tiles(f"{name} {type}", by_tiles, draw, dry=dry)
        by_wide_tiles = [partial(_by_wide_tiles, weight, gated) for weight in ring]
        yield from _wide_tiles(f"{name} {type}", by_wide_tiles, draw, dry=dry)
        dense = [partial(_dense, weight, gated) for weight in ring]
        yield from _dense_products(f"{name} {type}", dense, draw, dry=dry)
    yield from _attention(device, dtype, dry=dry)


def _matrices(*, dry: bool) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Name, type, size, and whether it has gates and their values."""
    if dry:
        return [("gate_up", "Q4_K", (4, 256), True)]
    sizes = SHAPE.matrices()
    gates = (2 * sizes["ffn_gate"][0], sizes["ffn_gate"][1])
    return [
        ("gate_up", "Q4_K", gates, True),
        ("attn_q", "Q4_K", sizes["attn_q"], False),
        ("attn_k", "Q4_K", sizes["attn_k"], False),
        ("ffn_down", "Q6_K", sizes["ffn_down"], False),
    ]


def _vectors(name: str, products: Products, draw: Draw, *, dry: bool) -> Iterator[Case]:
    for rows in (1,) if dry else (1, 2, 4, 8):
        x = draw(rows)
        for outs, warps in ((2, 1),) if dry else product((2, 4, 8), (1, 2, 4)):
            if outs * rows <= 32:
                yield Case(
                    f"vector, {name}, {rows} rows, {outs} outputs, {warps} warps",
                    [partial(each, x) for each in products],
                    partial(
                        patch.multiple, vector, OUTS={rows: outs},
                        warps_of=lambda outs, elements, warps=warps: warps,
                    ),
                )  # fmt: skip


def _fragments(name: str, products: Products, draw: Draw, *, dry: bool) -> Iterator[Case]:
    for rows in _FRAGMENT_ROWS[: 1 if dry else None]:
        x = draw(rows)
        for outs, warps in _FRAGMENTS[: 1 if dry else None]:
            yield Case(
                f"fragments, {name}, {rows} rows, {outs} outputs, {warps} warps",
                [partial(each, x) for each in products],
                partial(
                    patch.multiple, fragments, OUTS=outs,
                    warps_of=lambda _, elements, warps=warps: min(
                        warps, fragments.most_warps(elements)
                    ),
                ),
            )  # fmt: skip


def _tiles(name: str, products: Products, draw: Draw, *, dry: bool) -> Iterator[Case]:
    for rows, variants in _TILES.items():
        x = draw(16 if dry else rows)
        for outs, groups, warps, stages in variants[: 1 if dry else None]:
            tiling = tiles.Tiling(rows, outs, groups, warps, 132, stages)
            yield Case(
                f"tile, {name}, {rows} rows, {outs} outputs, {groups} groups, {warps} warps, "
                f"{stages} stages",
                [partial(each, x) for each in products],
                partial(patch.object, tiles, "_tiling_of", lambda x, weight, tiling=tiling: tiling),
            )


def _wide_tiles(name: str, products: Products, draw: Draw, *, dry: bool) -> Iterator[Case]:
    for rows in _WIDE_ROWS[: 1 if dry else None]:
        x = draw(16 if dry else rows)
        for tile, outs in _WIDE_TILES[: 1 if dry else None]:
            tiling = tiles.Tiling(tile, outs, 4, min(8, outs // 16), 132)
            yield Case(
                f"wide tile, {name}, {rows} rows, {tile} rows each, {outs} outputs",
                [partial(each, x) for each in products],
                partial(patch.object, wide_tiles, "tiling_of", lambda rows, tiling=tiling: tiling),
            )


def _dense_products(name: str, products: Products, draw: Draw, *, dry: bool) -> Iterator[Case]:
    """What wide tiles replace."""
    rows = _WIDE_ROWS[-1]
    x = draw(16 if dry else rows)
    calls = [partial(each, x) for each in products]
    yield Case(f"dense, {name}, {rows} rows", calls, nullcontext)


def _by_vectors(weight: Weight, gated: bool, x: Tensor) -> Tensor:
    if gated:
        return vector.gated_vectors(x, weight, silu_curve())
    return vector.vector_products(x, (weight,))[0]


def _by_fragments(weight: Weight, gated: bool, x: Tensor) -> Tensor:
    if gated:
        return fragments.gated_fragments(x, weight, silu_curve())
    return fragments.fragment_products(x, (weight,), x.dtype)[0]


def _by_tiles(weight: Weight, gated: bool, x: Tensor) -> Tensor:
    if gated:
        return tiles.gated_tiles(x, weight, silu_curve())
    return tiles.tile_product(x, weight)


def _by_wide_tiles(weight: Weight, gated: bool, x: Tensor) -> Tensor:
    if gated:
        return wide_tiles.gated_wide_tiles(x, weight, silu_curve())
    return wide_tiles.wide_products(x, (weight,), x.dtype)[0]


def _dense(weight: Weight, gated: bool, x: Tensor) -> Tensor:
    result = products._dense_product(x, weight)
    return gate(silu_curve(), *result.chunk(2, dim=1)) if gated else result


def _attention(device: torch.device, dtype: torch.dtype, *, dry: bool) -> Iterator[Case]:
    shape = speed.TINY if dry else SHAPE
    decoding = list(product((32, 64, 128), (2, 4), (2, 3), (2, 4)))
    for sequences, tokens in ((2, 20),) if dry else _DECODING:
        call = _attend(shape, (tokens,) * sequences, 1, device, dtype)
        for positions, warps, stages, each in decoding[: 1 if dry else None]:
            yield Case(
                f"decoding, {sequences} of {tokens}, {positions} positions, {warps} warps, "
                f"{stages} stages, {each} programs each",
                [call],
                partial(_decoding_with, positions, each, num_warps=warps, num_stages=stages),
            )
    for name, lengths in {"20 and 40": (20, 40)}.items() if dry else _UNEVEN.items():
        call = _attend(shape, lengths, 1, device, dtype)
        for least in _LEAST_PARTS[: 1 if dry else None]:
            parts = partial(patch.object, attention, "LEAST_PARTS", least)
            yield Case(f"decoding, {name}, {least} parts at least", [call], parts)
    prefill = list(product((64, 128), (64, 128), (4, 8), (2, 3)))
    for rows, tokens in ((4, 20),) if dry else _PROMPTS:
        call = _attend(shape, (tokens,), rows, device, dtype)
        for heads, positions, warps, stages in prefill[: 1 if dry else None]:
            yield Case(
                f"prefill, {rows} of {tokens}, {heads} heads, {positions} positions, "
                f"{warps} warps, {stages} stages",
                [call],
                partial(
                    _with_options, "prefill_options", M=heads, N=positions, num_warps=warps,
                    num_stages=stages,
                ),
            )  # fmt: skip


def _with_options(name: str, **options: int) -> AbstractContextManager[object]:
    own = getattr(attention.Shape, name).fget
    return patch.object(attention.Shape, name, property(lambda shape: own(shape) | options))


@contextmanager
def _decoding_with(positions: int, each: int, **options: int) -> Iterator[None]:
    """With other blocks, also where splits are merged, and so many programs for each
    multiprocessor."""
    of_shape = property(lambda shape: positions)
    with (
        _with_options("decode_options", **options),
        patch.object(attention.Shape, "_decode_positions", of_shape),
        patch.object(attention, "PROGRAMS_EACH", each),
    ):
        yield


def _attend(
    shape: Shape, lengths: Sequence[int], rows: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Attention of the last rows of sequences with so many tokens, whose pages are in random
    order."""
    sequences, each = len(lengths), [-(-tokens // _PAGE_TOKENS) for tokens in lengths]
    size = sum(each), _PAGE_TOKENS, shape.kv_heads, shape.head_dim
    keys, values = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    pages = LayerPages(keys, values, 0)
    ends = torch.cat([torch.arange(end - rows, end, dtype=torch.int32) + 1 for end in lengths])
    slots = torch.arange(sequences, dtype=torch.int32).repeat_interleave(rows)
    spans = [RowSpan(n * rows, (n + 1) * rows, n, end - rows) for n, end in enumerate(lengths)]
    table = pad_sequence(torch.randperm(sum(each)).int().split(each), batch_first=True)
    plan = AttentionPlan(
        table, slots, torch.zeros_like(ends), ends, slots.long(), tuple(spans)
    ).to(device)  # fmt: skip
    queries = torch.randn(sequences * rows, shape.heads, shape.head_dim, device=device, dtype=dtype)
    assert pages.type in (CacheType.BFLOAT16, CacheType.FLOAT32)
    scale = shape.head_dim**-0.5
    return lambda: attention.paged_attention(queries, pages, plan, Scoring(scale))
