"""Checks every kernel on the device against float64: with poisoned results, alone and in batches.

Kernels that have never run on a device come first.
"""

from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch

from runtime.kernels.selection import highest_twin
from runtime.kernels.slot_tables import slot_entries_twin
from runtime.kernels.triton.selection import highest
from runtime.kernels.triton.slot_tables import slot_entries
from tools.gpu_check.attention import attention_checks
from tools.gpu_check.cache_writes import write_checks
from tools.gpu_check.comparison import poisoned
from tools.gpu_check.draws import draw_checks
from tools.gpu_check.pointwise import pointwise_checks
from tools.gpu_check.products import expert_checks, gated_checks, product_checks
from tools.gpu_check.recurrent import recurrent_checks
from tools.gpu_check.report import Check, Task


def run(task: Task) -> None:
    with poisoned():
        task.make(
            chain(
                _lookup_checks(task), draw_checks(task), pointwise_checks(task),
                recurrent_checks(task), write_checks(task), attention_checks(task),
                gated_checks(task), expert_checks(task), product_checks(task),
            )
        )  # fmt: skip


def _lookup_checks(task: Task) -> Iterator[Check]:
    yield "highest", partial(_check_highest, task)
    yield "entries of slots", partial(_check_entries, task)


def _check_highest(task: Task) -> None:
    values = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    got = highest(values.to(task.device), 8).cpu()
    task.report.check("highest", torch.equal(got, highest_twin(values, 8)))


def _check_entries(task: Task) -> None:
    draw = torch.Generator().manual_seed(12)
    table = torch.randint(0, 2**31 - 1, (5, 12), dtype=torch.int32, generator=draw)
    slots = torch.randint(0, 5, (300,), dtype=torch.int32, generator=draw)
    indices = torch.randint(0, 12 * 16, (300,), generator=draw)
    there = (each.to(task.device) for each in (table, slots, indices))
    got = slot_entries(*there, page_tokens=16).cpu()
    expected = slot_entries_twin(table, slots, indices, page_tokens=16)
    task.report.check("entries of slots", torch.equal(got, expected))
