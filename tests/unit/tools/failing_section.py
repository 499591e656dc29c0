"""A section of the check of a GPU that ends with an error, after a check that ends its process."""

import os

from tools.gpu_check.report import Task

FAILING = __name__


def run(task: Task) -> None:
    def end() -> None:
        task.report.check("before", True)
        os._exit(7)

    task.make([("first", lambda: task.report.check("first", True)), ("ending", end)])
    task.make([("guarded", raise_kept)])
    task.report.figure("speed", 3.0, "GB/s")
    raise RuntimeError("a kernel failed")


def raise_kept() -> None:
    raise ValueError("kept")
