"""`python -m tools.gpu_check.child MODULE FOLDER ROWS TAKEN [OPTION...]`: a process of a section,
which makes the checks that no other one has begun."""

import argparse
from importlib import import_module
from pathlib import Path

import torch

from serve_app.child_process import end_with_parent
from tools.gpu_check.report import NO_DEVICE, Report, Task


def task_in(folder: Path, rows: Path, taken: Path, *, dry: bool, llama_cpp: Path | None) -> Task:
    """The task of a process. RuntimeError if there is no CUDA device, unless `dry`."""
    if dry:
        device = torch.device("cpu")
        return Task(device, True, Report(rows, NO_DEVICE), folder, taken, llama_cpp)
    if not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device; `--dry-run` computes tiny sizes on a CPU.")
    report = Report(rows, torch.cuda.get_device_name(), torch.cuda.synchronize)
    device = torch.device("cuda", torch.cuda.current_device())
    return Task(device, False, report, folder, taken, llama_cpp)


def main() -> None:
    end_with_parent()
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.child", description=__doc__)
    parser.add_argument("module")
    for name in ("folder", "rows", "taken"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--llama-cpp", type=Path)
    given = parser.parse_args()
    task = task_in(
        given.folder, given.rows, given.taken, dry=given.dry_run, llama_cpp=given.llama_cpp
    )
    import_module(given.module).run(task)


if __name__ == "__main__":
    main()
