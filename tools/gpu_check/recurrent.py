"""Checks recurrent layers against `transformers`, in steps of several sequences."""

from collections.abc import Iterator
from functools import partial

from runtime.kernels.triton import delta
from runtime.kernels.triton.selective_scan import selective_scan
from runtime.kernels.triton.state_space import state_space
from runtime.kernels.triton.wkv import wkv7
from tests.kernels.sequence_steps import GatedDelta, Kernels, Mamba, Mamba2, Rule, Sequences, Wkv7
from tools.gpu_check.comparison import check_close
from tools.gpu_check.report import Check, Task

RULES: dict[str, tuple[Rule, Kernels]] = {
    "state space": (Mamba2(), (delta.short_convolution, state_space)),
    "selective scan": (Mamba(), (delta.short_convolution, selective_scan)),
    "wkv7": (Wkv7(), (delta.short_convolution, wkv7)),
    "delta of elements": (
        GatedDelta(by_element=True), (delta.short_convolution, delta.gated_delta),
    ),
    "delta": (GatedDelta(), (delta.short_convolution, delta.gated_delta)),
}  # fmt: skip


def recurrent_checks(task: Task) -> Iterator[Check]:
    for name, (rule, kernels) in RULES.items():
        for shape in ("one_head",) if task.dry else rule.shapes:
            of = f"{name}, {shape}"
            yield of, partial(_check, task, of, rule, shape, kernels)


def _check(task: Task, name: str, rule: Rule, shape: str, kernels: Kernels) -> None:
    sequences = Sequences(rule, shape, [7, 3], device=str(task.device))
    for number, found in sequences.steps([{0: 4}, {1: 3, 0: 3}], kernels).items():
        expected = sequences.expected(number)
        for what, one, other in zip(("convolution", "rule"), found, expected, strict=True):
            check_close(task, f"{name}, {number}, {what}", one, other)
