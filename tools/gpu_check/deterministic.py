"""Checks that with deterministic computing rows have the same bits alone and among others."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from runtime.kernels.attention import Scoring
from runtime.kernels.triton.attention import paged_attention
from runtime.kernels.triton.log_sums import log_sums
from runtime.kernels.triton.products import product
from runtime.kv.cache_types import CacheType
from runtime.quant.block_types import BLOCK_TYPES, block_type
from runtime.quant.weight import Compute
from tests.families.agreement import random_tokens
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.kernels import test_attention as scenes
from tests.kernels.random_weights import random_weight
from tools.gpu_check.models import FAMILIES, load_decoder
from tools.gpu_check.report import Check, Task

ROWS = ((0, 1), (3, 6), (60, 77), (100, 200))  # ranges of 200 rows
OUTS, ELEMENTS = 130, 2304


def run(task: Task) -> None:
    task.make(_checks(task))


def _checks(task: Task) -> Iterator[Check]:
    yield "logarithms of sums", partial(_check_log_sums, task)
    for type in (CacheType.FLOAT32,) if task.dry else CacheType:
        yield f"attention, {type.value}", partial(_check_attention, task, type)
    for family in ("llama",) if task.dry else FAMILIES:
        yield family, partial(_check_family, task, family)
    for name in ("F16",) if task.dry else [type.name for type in BLOCK_TYPES.values()]:
        yield f"product, {name}", partial(_check_product, task, name)


def _check_log_sums(task: Task) -> None:
    logits = torch.randn(9, 5000, device=task.device)
    same = torch.equal(log_sums(logits[4:5]), log_sums(logits)[4:5])
    task.report.check("logarithms of sums", same)


def _check_product(task: Task, name: str) -> None:
    outs, elements = (2, 64) if task.dry else (OUTS, ELEMENTS)
    weight = random_weight(block_type(name), outs, elements)
    weight = replace(weight, deterministic=True).in_planes(task.device)
    x = torch.randn(200, elements, device=task.device)
    for dtype in (torch.float32,) if task.dry else (torch.float32, torch.bfloat16):
        together = product(x, weight, dtype)
        parts = [
            product(x[begin:end], weight, dtype) for begin, end in ROWS[: 1 if task.dry else 4]
        ]
        pairs = zip(ROWS, parts, strict=False)
        different = [(b, e) for (b, e), part in pairs if not torch.equal(part, together[b:e])]
        task.report.check(f"product, {name}, {dtype}", not different, different=different)


def _check_attention(task: Task, type: CacheType) -> None:
    """Compares attention of a whole batch with that of each sequence's first and last row alone."""
    batch = "decoding" if task.dry else "prefill and decode"
    queries, pages, plan = scenes.scene(batch, "four share", type=type)
    queries = queries.to(task.device, torch.float32 if task.dry else torch.bfloat16)
    parts = pages.keys.to(task.device), pages.values.to(task.device)
    pages = replace(pages, keys=parts[0], values=parts[1])
    attend = partial(paged_attention, scoring=Scoring(scenes.SCALE), deterministic=True)
    together = attend(queries, pages, plan.to(task.device))
    different = []
    for row in sorted({row for span in plan.spans for row in (span.begin, span.end - 1)}):
        one = scenes.rows_of(plan, row, row + 1).to(task.device)
        got = attend(queries[row : row + 1], pages, one)
        if not torch.equal(got[0], together[row]):
            different.append(row)
    task.report.check(f"attention, {type.value}", not different, different=different)


def _check_family(task: Task, family: str) -> None:
    """Compares a prompt that is computed at once and alone with the same prompt in chunks, beside
    another sequence."""
    path = task.folder / f"{family}.gguf"
    row = TEXT_MODELS[family]
    row.write(path, next(iter(row.configs)))
    dtype = torch.float32 if task.dry else torch.bfloat16
    decoder = load_decoder(path, task.device, dtype, Compute.FINE, deterministic=True)
    one, two = random_tokens(41, seed=1), random_tokens(23, seed=2)
    alone, beside = (PagedDecoder(decoder, device=task.device) for _ in range(2))
    expected = torch.cat([alone.feed({0: one}), alone.feed({0: [7]})])
    found = [
        beside.feed({1: two, 0: one[:9]})[23:],
        beside.feed({0: one[9:], 1: [5]})[:32],
        beside.feed({1: [8], 0: [7]})[1:],
    ]
    same = torch.equal(torch.cat(found), expected)
    task.report.check(f"{family}, logits in any batch", same)
