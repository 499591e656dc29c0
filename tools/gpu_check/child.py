"""`python -m tools.gpu_check.child MODULE FOLDER [--dry-run]`: runs one section in this process."""

import sys
from importlib import import_module
from pathlib import Path

import torch

from tools.gpu_check.report import NO_DEVICE, Report, Task


def task_in(folder: Path, *, dry: bool) -> Task:
    """The task of a section. RuntimeError if there is no CUDA device, unless `dry`."""
    if dry:
        return Task(torch.device("cpu"), True, Report(folder / "rows.jsonl", NO_DEVICE), folder)
    if not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device; `--dry-run` computes tiny sizes on a CPU.")
    report = Report(folder / "rows.jsonl", torch.cuda.get_device_name())
    return Task(torch.device("cuda", torch.cuda.current_device()), False, report, folder)


def main(module: str, folder: str, *options: str) -> None:
    import_module(module).run(task_in(Path(folder), dry="--dry-run" in options))


if __name__ == "__main__":
    main(*sys.argv[1:])
