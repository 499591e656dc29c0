"""Reports a section's checks and figures: a line of JSON for each, written at once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

NO_DEVICE = "none: dry run on a CPU"


@dataclass(frozen=True)
class Report:
    """device: the name of the device that computes, NO_DEVICE in a dry run."""

    path: Path
    device: str

    def check(self, name: str, passed: bool, **facts: object) -> None:
        self._write(kind="check", name=name, passed=passed, **facts)

    def figure(self, name: str, value: float, unit: str) -> None:
        """Reports a figure; in a dry run without its value."""
        shown = None if self.device == NO_DEVICE else float(f"{value:.4g}")
        self._write(kind="figure", name=name, value=shown, unit=unit)

    @contextmanager
    def guarding(self, name: str) -> Iterator[None]:
        """Records an exception as a failed check, so that the section continues."""
        try:
            yield
        except Exception as error:
            self.check(name, False, error=f"{type(error).__name__}: {error}"[:500])

    def _write(self, **fields: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**fields, "device": self.device}) + "\n")


@dataclass(frozen=True)
class Task:
    """What a section needs to run. dry: it uses tiny sizes on a CPU, with kernels in Triton's
    interpreter. folder: a temporary folder for files."""

    device: torch.device
    dry: bool
    report: Report
    folder: Path
