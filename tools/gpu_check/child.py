"""`python -m tools.gpu_check.child MODULE FOLDER PART PARTS [OPTION...]`: runs one section, or a
part of its checks, in this process."""

import argparse
from importlib import import_module
from pathlib import Path

import torch

from tools.gpu_check.report import NO_DEVICE, Report, Task


def task_in(
    folder: Path, *, dry: bool, part: int = 0, parts: int = 1, llama_cpp: Path | None = None
) -> Task:
    """The task of a process. RuntimeError if there is no CUDA device, unless `dry`."""
    if dry:
        report, device = Report(folder / "rows.jsonl", NO_DEVICE), torch.device("cpu")
        return Task(device, True, report, folder, part, parts, llama_cpp)
    if not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device; `--dry-run` computes tiny sizes on a CPU.")
    report = Report(folder / "rows.jsonl", torch.cuda.get_device_name())
    device = torch.device("cuda", torch.cuda.current_device())
    return Task(device, False, report, folder, part, parts, llama_cpp)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.child", description=__doc__)
    parser.add_argument("module")
    parser.add_argument("folder", type=Path)
    parser.add_argument("part", type=int)
    parser.add_argument("parts", type=int)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--llama-cpp", type=Path)
    given = parser.parse_args()
    task = task_in(
        given.folder, dry=given.dry_run, part=given.part, parts=given.parts,
        llama_cpp=given.llama_cpp,
    )  # fmt: skip
    import_module(given.module).run(task)


if __name__ == "__main__":
    main()
