"""Checks the kernels that draw tokens against their twins."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.kernels.draws import DrawnRows, draw_all_twin, draw_top_twin
from runtime.kernels.triton.draws import draw_top
from runtime.kernels.triton.thresholds import draw_all
from runtime.worker.sampler import parameter_spec
from tools.gpu_check.report import Task

Draw = Callable[..., tuple[Tensor, Tensor]]
# The kernel, its twin, the sampling parameters, and further arguments for a number of rows.
DRAWS: dict[str, tuple[Draw, Draw, SamplingParams, Callable[[int], dict[str, int]]]] = {
    "draw, greedy": (
        draw_top, draw_top_twin, SamplingParams(temperature=0.0),
        lambda rows: {"greedy": rows, "width": 0},
    ),
    "draw, top_k": (
        draw_top, draw_top_twin, SamplingParams(top_k=40, top_p=0.95),
        lambda rows: {"greedy": 0, "width": 40},
    ),
    "draw, top_k 300": (
        draw_all, draw_all_twin, SamplingParams(top_k=300, temperature=3.0),
        lambda rows: {"ordered": rows},
    ),
    "draw, top_p": (
        draw_all, draw_all_twin, SamplingParams(top_k=0, top_p=0.95, min_p=1e-4),
        lambda rows: {"ordered": rows},
    ),
    "draw, whole": (
        draw_all, draw_all_twin, SamplingParams(top_k=0, top_p=1.0),
        lambda rows: {"ordered": 0},
    ),
}  # fmt: skip


def check_draws(task: Task) -> None:
    """Tokens must equal those of the twins on a CPU."""
    vocabulary, rows = 500 if task.dry else 128_256, 3 if task.dry else 64
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(4))
    row_numbers = torch.arange(rows)
    spec = parameter_spec(context_tokens=rows, vocab_size=vocabulary)
    for name, (kernel, twin, params, options) in DRAWS.items():
        with task.report.guarding(name):
            loads = [SlotLoad(n, (), replace(params, seed=n)) for n in range(rows)]
            floats, ints = spec.rows(loads)
            history = torch.zeros(rows, rows, dtype=torch.int32)
            given = (
                logits, row_numbers, row_numbers, torch.tensor(floats), torch.tensor(ints), history,
            )  # fmt: skip
            there = DrawnRows(*(each.to(task.device) for each in given))
            got, finite = kernel(there, **options(rows))
            expected, _ = twin(DrawnRows(*given), **options(rows))
            same = torch.equal(got.cpu(), expected) and bool(finite.all())
            task.report.check(name, same)
