"""Checks the kernels of the sampler against their twins."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.kernels.draws import DrawnRows, draw_all_twin, draw_top_twin
from runtime.kernels.repetitions import RepeatedRows, penalise_repetitions_twin
from runtime.kernels.triton.draws import draw_top
from runtime.kernels.triton.log_sums import log_sums
from runtime.kernels.triton.repetitions import penalise_repetitions
from runtime.kernels.triton.thresholds import draw_all
from runtime.worker.sampler import parameter_spec
from tools.gpu_check.report import Check, Task

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


def draw_checks(task: Task) -> Iterator[Check]:
    for name in DRAWS:
        yield name, partial(_check_draw, task, name)
    for base, allowed in ((1.75, 2), (3.0, 1), (1.0, 0)):
        name = f"penalties of repetitions, base {base}, {allowed} allowed"
        yield name, partial(_check_repetitions, task, name, base, allowed)
    yield "logarithms of sums", partial(_check_log_sums, task)


def _check_draw(task: Task, name: str) -> None:
    """Tokens must equal those of the twin on a CPU."""
    vocabulary, rows = 500 if task.dry else 128_256, 3 if task.dry else 64
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(4))
    row_numbers = torch.arange(rows)
    spec = parameter_spec(context_tokens=rows, vocab_size=vocabulary)
    kernel, twin, params, options = DRAWS[name]
    loads = [SlotLoad(n, (), replace(params, seed=n)) for n in range(rows)]
    floats, ints = spec.rows(loads)
    history = torch.zeros(rows, rows, dtype=torch.int32)
    given = logits, row_numbers, row_numbers, torch.tensor(floats), torch.tensor(ints), history
    there = DrawnRows(*(each.to(task.device) for each in given))
    got, finite = kernel(there, **options(rows))
    expected, _ = twin(DrawnRows(*given), **options(rows))
    task.report.check(name, torch.equal(got.cpu(), expected) and bool(finite.all()))


def _check_repetitions(task: Task, name: str, base: float, allowed: int) -> None:
    """DRY, of sequences of a few tokens, of which some are breakers; a row has none."""
    rows, context, vocabulary = (4, 60, 96) if task.dry else (33, 3000, 128_256)
    draw = torch.Generator().manual_seed(6)
    breakers = torch.zeros(rows, vocabulary // 32, dtype=torch.int32)
    breakers[:, 1] = 1  # token 32
    history = torch.randint(30, 33 if allowed else 35, (rows, context), generator=draw).int()
    ends = torch.randint(1, context, (rows,), generator=draw)
    ends[0] = context - 1
    ints = torch.tensor([[allowed, 2**31 - 1, 60]]).repeat(rows, 1)
    ints[1, 1] = 12  # last tokens
    floats, slots = torch.tensor([[0.8, base]]).repeat(rows, 1), torch.arange(rows).flip(0)

    def repeated(device: torch.device) -> RepeatedRows:
        return RepeatedRows(
            torch.arange(1, rows, device=device), slots.to(device), ends.to(device),
            history.to(device), floats.to(device), ints.to(device), breakers.to(device),
            window=context, longest=70,
        )  # fmt: skip

    logits = torch.zeros(rows, vocabulary)
    there = logits.to(task.device)
    penalise_repetitions(there, repeated(task.device))
    penalise_repetitions_twin(logits, repeated(logits.device))
    close = torch.allclose(there.cpu(), logits, rtol=1e-5, atol=0)
    task.report.check(name, close and bool(logits.any()))


def _check_log_sums(task: Task) -> None:
    """Logits of some thousands, of which a row has infinities."""
    logits = 30 * torch.randn(5, 500 if task.dry else 128_256)
    logits[2, ::2] = -torch.inf
    got, expected = log_sums(logits.to(task.device)).cpu(), logits.double().logsumexp(-1)
    error = (got.double().flatten() - expected).abs().max().item()
    task.report.check("logarithms of sums", error <= 1e-4, error=error)
