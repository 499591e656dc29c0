"""`python -m tools.gpu_check.child MODULE FOLDER PART PARTS [--dry-run]`: runs one section, or a
part of its checks, in this process."""

import sys
from importlib import import_module
from pathlib import Path

import torch

from tools.gpu_check.report import NO_DEVICE, Report, Task


def task_in(folder: Path, *, dry: bool, part: int = 0, parts: int = 1) -> Task:
    """The task of a process. RuntimeError if there is no CUDA device, unless `dry`."""
    if dry:
        return Task(
            torch.device("cpu"), True, Report(folder / "rows.jsonl", NO_DEVICE), folder, part, parts
        )
    if not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device; `--dry-run` computes tiny sizes on a CPU.")
    report = Report(folder / "rows.jsonl", torch.cuda.get_device_name())
    device = torch.device("cuda", torch.cuda.current_device())
    return Task(device, False, report, folder, part, parts)


def main(module: str, folder: str, part: str, parts: str, *options: str) -> None:
    dry = "--dry-run" in options
    import_module(module).run(task_in(Path(folder), dry=dry, part=int(part), parts=int(parts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
