"""Measures the device's ceilings, bytes and operations per second; and times calls."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from tools.gpu_check.report import Task

_RECORDED = 16  # calls in a graph, at least


@dataclass(frozen=True)
class Ceilings:
    """bytes_s: bytes per second that a copy reads and writes; operations_s: operations per second
    of a bfloat16 product."""

    bytes_s: float
    operations_s: float


def run(task: Task) -> None:
    found = measure(task)
    task.report.figure("copy, read and written", found.bytes_s / 1e12, "TB/s")
    task.report.figure("bfloat16 product", found.operations_s / 1e12, "TFLOP/s")


def measure(task: Task) -> Ceilings:
    nbytes, side = (1 << 16, 32) if task.dry else (4 << 30, 8192)
    source = torch.ones(nbytes, dtype=torch.uint8, device=task.device)
    target = torch.empty_like(source)
    copying = seconds(lambda: target.copy_(source), task.device)
    task.report.check("a copy is exact", bool(torch.equal(source, target)))
    one = torch.randn(side, side, device=task.device, dtype=torch.bfloat16)
    multiplying = seconds(lambda: one @ one, task.device)
    return Ceilings(2 * nbytes / copying, 2 * side**3 / multiplying)


def recorded_seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The mean seconds of calls that are launched in turn by one CUDA graph, so that the host takes
    no part in it. On a CPU, the seconds of the first one."""
    if device.type != "cuda":
        return seconds(calls[0], device)
    times = max(1, _RECORDED // len(calls))
    calls[0]()  # compiles kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (*calls,) * times:
            call()
    return seconds(graph.replay, device, times=4) / (times * len(calls))


def seconds(call: Callable[[], object], device: torch.device, *, times: int = 20) -> float:
    """The median seconds of a call. On CUDA, between events on the stream."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3
