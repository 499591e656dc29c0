"""Which kernels the time of a step goes to."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import nlargest
from operator import itemgetter
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from runtime.engine.step_plan import StepPlan
from runtime.worker.runner import DeviceRunner
from runtime.worker.step_results import Launched
from tools.gpu_check.report import Task

_SHOWN, _NAME = 10, 40
_MOST_STEPS, _DRY_STEPS = 8, 1


class StepProfile:
    """Profiles some consecutive steps, from the first one whose number of rows is `wanted`. Starts
    and ends in the engine's thread, as torch's profiler must."""

    def __init__(self, wanted: Callable[[int], bool], *, dry: bool) -> None:
        self._wanted, self._dry = wanted, dry
        self._most = _DRY_STEPS if dry else _MOST_STEPS
        activity = ProfilerActivity.CPU if dry else ProfilerActivity.CUDA
        self._profile = profile(activities=[activity])
        self.steps, self.ended = 0, False

    def before(self, rows: int) -> None:
        """Called before each step is launched."""
        if self.ended:
            return
        if self.steps and (self.steps == self._most or not self._wanted(rows)):
            if not self._dry:
                torch.cuda.synchronize()
            self._profile.stop()
            self.ended = True
        elif self._wanted(rows):
            if not self.steps:
                self._profile.start()
            self.steps += 1

    def launches(self) -> float:
        """Kernels and copies on the device per step."""
        return sum(1 for _ in self._on_device()) / self.steps

    def microseconds(self) -> dict[str, float]:
        """Per step, by the name of the kernel."""
        found = defaultdict[str, float](float)
        for name, taken in self._on_device():
            found[name[:_NAME]] += taken / self.steps
        return found

    def _on_device(self) -> Iterator[tuple[str, float]]:
        for event in self._profile.events() or ():
            if event.device_type == DeviceType.CUDA:
                yield event.name, event.time_range.elapsed_us()


@contextmanager
def profiling(task: Task, wanted: Callable[[int], bool]) -> Iterator[StepProfile]:
    found, launch = StepProfile(wanted, dry=task.dry), DeviceRunner.launch

    def profiled(runner: DeviceRunner, plan: StepPlan) -> Launched:
        found.before(sum(chunk.length for chunk in plan.chunks))
        return launch(runner, plan)

    with patch.object(DeviceRunner, "launch", profiled):
        yield found


def report_kernels(task: Task, name: str, found: StepProfile) -> None:
    """The launches of a step, and the kernels that take the most time."""
    task.report.check(f"{name}, profiled", found.ended and (task.dry or found.launches() > 0))
    task.report.figure(f"{name}, launches a step", found.launches(), "launches")
    times = found.microseconds()
    task.report.figure(f"{name}, kernels of a step", sum(times.values()) / 1e3, "ms")
    for kernel, taken in nlargest(_SHOWN, times.items(), key=itemgetter(1)):
        task.report.figure(f"{name}, {kernel}", taken, "µs a step")
