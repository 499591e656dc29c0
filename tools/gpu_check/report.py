"""What a section found: a line of JSON for each check and figure, written at once."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

NO_DEVICE = "none: dry run on a CPU"
Item = TypeVar("Item")
# "at least" or "at most", and the number.
Goal = tuple[Literal["at least", "at most"], float]


@dataclass(frozen=True)
class Report:
    """device: the name of the device that computes, NO_DEVICE in a dry run."""

    path: Path
    device: str

    def check(self, name: str, passed: bool, **facts: object) -> None:
        self._write(kind="check", name=name, passed=passed, **facts)

    def figure(self, name: str, value: float, unit: str, goal: Goal | None = None) -> None:
        """Without a device there is a line, but no value."""
        shown = None if self.device == NO_DEVICE else float(f"{value:.4g}")
        self._write(kind="figure", name=name, value=shown, unit=unit, goal=goal)

    def skip(self, name: str, reason: str, goal: Goal) -> None:
        """A figure that this machine cannot give."""
        self._write(kind="skipped", name=name, reason=reason, goal=goal)

    @contextmanager
    def guarding(self, name: str) -> Iterator[None]:
        """Record an exception as a failed check, and continue the section."""
        try:
            yield
        except Exception as error:
            self.check(name, False, error=f"{type(error).__name__}: {error}"[:500])

    def _write(self, **fields: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**fields, "device": self.device}) + "\n")


@dataclass(frozen=True)
class Task:
    """dry: on a CPU, tiny sizes, kernels in Triton's interpreter. folder: for files. part, parts:
    which share of the section's checks this process makes. llama_cpp: the folder of llama.cpp's
    programs."""

    device: torch.device
    dry: bool
    report: Report
    folder: Path
    part: int = 0
    parts: int = 1
    llama_cpp: Path | None = None

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items of this process; each item belongs to one process."""
        return items[self.part :: self.parts]
