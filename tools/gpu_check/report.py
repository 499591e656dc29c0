"""What a section found: a line of JSON for each check and figure, written at once."""

import fcntl
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

NO_DEVICE = "none: dry run on a CPU"
# "at least" or "at most", and the number.
Goal = tuple[Literal["at least", "at most"], float]
# A name in one line, and what makes the check.
Check = tuple[str, Callable[[], object]]


class DeviceLostError(Exception):
    """The device computes nothing more in this process, as after an illegal access."""


@dataclass(frozen=True)
class Report:
    """device: the name of the device that computes, NO_DEVICE in a dry run. synchronize: waits for
    the device, and raises the error of what it has computed."""

    path: Path
    device: str
    synchronize: Callable[[], object] = lambda: None

    def check(self, name: str, passed: bool, **facts: object) -> None:
        self._write(kind="check", name=name, passed=passed, **facts)

    def figure(self, name: str, value: float, unit: str, goal: Goal | None = None) -> None:
        """Without a device there is a line, but no value."""
        shown = None if self.device == NO_DEVICE else float(f"{value:.4g}")
        self._write(kind="figure", name=name, value=shown, unit=unit, goal=goal)

    def skip(self, name: str, reason: str, goal: Goal | None = None) -> None:
        """A check or figure that this machine cannot give."""
        self._write(kind="skipped", name=name, reason=reason, goal=goal)

    def begun(self, name: str) -> None:
        """So that it is known which check ended the process."""
        self._write(kind="begun", name=name)

    def ended(self, name: str, seconds: float) -> None:
        self._write(kind="ended", name=name, seconds=round(seconds, 2))

    @contextmanager
    def guarding(self, name: str) -> Iterator[None]:
        """Record an exception as a failed check, and continue the section. DeviceLostError if the
        device computes nothing more."""
        try:
            yield
            self.synchronize()
        except DeviceLostError:
            raise
        except Exception as error:
            self.check(name, False, error=f"{type(error).__name__}: {error}"[:500])
            self._check_device()

    def _check_device(self) -> None:
        """Such an error of CUDA is that of every later call."""
        try:
            self.synchronize()
        except Exception as error:
            raise DeviceLostError(str(error)) from error

    def _write(self, **fields: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**fields, "device": self.device}) + "\n")


@dataclass(frozen=True)
class Task:
    """dry: on a CPU, tiny sizes, kernels in Triton's interpreter. folder: for files. taken: a file
    with the checks that processes of the section have begun. llama_cpp: the folder of llama.cpp's
    programs."""

    device: torch.device
    dry: bool
    report: Report
    folder: Path
    taken: Path
    llama_cpp: Path | None = None

    def make(self, checks: Iterable[Check]) -> None:
        """Makes the checks that no process of the section has begun, in order."""
        for name, check in checks:
            if self._take(name):
                self.report.begun(name)
                began = time.monotonic()
                with self.report.guarding(name):
                    check()
                self.report.ended(name, time.monotonic() - began)

    def _take(self, name: str) -> bool:
        """Whether the check is left to this process."""
        with self.taken.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if name in file.read().splitlines():
                return False
            file.write(name + "\n")
            return True
