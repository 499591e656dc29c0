"""Compares what the device computes with numbers in float64."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tools.gpu_check.report import Task

# The largest error of numbers of about 1.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def check_close(task: Task, name: str, got: Tensor, expected: Tensor) -> None:
    """Checks that `got` is close to `expected`; NaN is not close to anything."""
    scale = max(1.0, expected.abs().max().item())
    error = (got.cpu().double() - expected.double()).abs().max().item() / scale
    task.report.check(name, error <= TOLERANCES[got.dtype], error=error)


def largest(errors: Iterable[float]) -> float:
    """The largest error, 0 without any; NaN if one is NaN, which `max` may lose."""
    return np.max([0.0, *errors]).item()


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are filled with NaN, so that numbers that a kernel leaves unwritten are NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.ones(1).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
