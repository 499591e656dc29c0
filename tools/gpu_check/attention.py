"""Checks attention to every type of cache against float64."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import torch

from runtime.kernels.triton.attention import paged_attention
from runtime.kv.cache_types import CacheType
from runtime.worker.model import LayerPages
from tests.kernels import test_attention as scenes
from tools.gpu_check.comparison import check_close
from tools.gpu_check.report import Check, Task

# So many rows fill a large device, and few of them see far more than 2,048 positions.
CROWD = {"crowd": (*((n % 5, 40 + n, 1) for n in range(136)), (0, 3000, 1), (1, 2047, 1),
                   (2, 2048, 1), (3, 2700, 1))}  # fmt: skip
# (batch, shape, window, options): names of tests/kernels/test_attention.py; scores that fall with
# distance, of rows that see each other both ways, and values in keys.
SCENES = (
    ("decoding", "four share", None, "distances"),
    ("decoding", "four share", None, "values in keys"),
    ("prefill and decode", "three share, odd sizes", None, "distances"),
    ("prefill and decode", "four share", None, "values in keys"),
    ("decoding", "three share, odd sizes", None, "plain"),
    ("decoding", "four share", 20, "capped, sinks"),
    ("decoding far away", "four share", None, "sinks"),
    ("prefill", "four share", None, "sinks"),
    ("prefill and decode", "all share, tiny", 33, "capped"),
)
CROWDED = (("crowd", "four share", None, "plain"), ("crowd", "four share", None, "distances"))
HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))


def attention_checks(task: Task) -> Iterator[Check]:
    types = [CacheType.FLOAT32] if task.dry else list(CacheType)
    cases = [*CROWDED, *SCENES]
    for (batch, shape, window, options), type in product(SCENES[:2] if task.dry else cases, types):
        name = f"attention, {batch}, {shape}, {window}, {options}, {type.value}"
        yield name, partial(_check_scene, task, name, batch, shape, window, options, type)
    for dims in HEADS[: 1 if task.dry else None]:
        for batch in ("decoding",) if task.dry else ("decoding", "prefill"):
            name = f"attention, {batch}, dims {dims}"
            yield name, partial(_check_heads, task, name, batch, dims)


def _check_heads(task: Task, name: str, batch: str, dims: tuple[int, int]) -> None:
    with patch.dict(scenes.SHAPES, {f"dims {dims}": (4, 2, *dims, 16)}):
        _check_scene(task, name, batch, f"dims {dims}", None, "plain", CacheType.FLOAT16)


def _check_scene(
    task: Task,
    name: str,
    batch: str,
    shape: str,
    window: int | None,
    options: str,
    type: CacheType,
) -> None:
    with patch.dict(scenes.BATCHES, CROWD):
        queries, pages, plan = scenes.scene(batch, shape, window=window, type=type)
    apart, distances = pages, None
    if options == "values in keys":
        pages, apart = scenes.in_keys(pages, pages.dims[0] // 2)
    if options == "distances":
        plan, distances = scenes.seen_both_ways(queries, plan)
    chosen = scenes.options_of(options if options in scenes.OPTIONS else "plain", queries.shape[1])
    chosen = replace(chosen, distances=distances)
    there = chosen
    if chosen.sinks is not None:
        there = replace(there, sinks=chosen.sinks.to(task.device))
    if distances is not None:
        parts = distances.slopes.to(task.device), distances.positions.to(task.device)
        there = replace(there, distances=scenes.Distances(*parts))
    narrow = torch.float16 if type is CacheType.FLOAT16 else torch.bfloat16
    dtypes = [torch.float32] if type is CacheType.FLOAT32 else [torch.float32, narrow]
    for dtype in dtypes[-1:] if task.dry else dtypes:
        narrowed = queries.to(dtype)
        expected = scenes.by_definition(narrowed, apart, plan, chosen)
        moved = _moved(pages, task.device), plan.to(task.device)
        got = paged_attention(narrowed.to(task.device), *moved, there)
        check_close(task, f"{name}, {dtype}", got, expected)


def _moved(pages: LayerPages, device: torch.device) -> LayerPages:
    keys, values = pages.keys.to(device), pages.values.to(device)
    if pages.values_in_keys:
        values = keys[..., : pages.values.shape[-1]]
    return replace(pages, keys=keys, values=values)
