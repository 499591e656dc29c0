"""A section of the check of a GPU, with a check that never ends."""

import os
from threading import Event

from tools.gpu_check.report import Task

HANGING = __name__


def run(task: Task) -> None:
    def hang() -> None:
        task.report.check("process", True, pid=os.getpid())
        Event().wait()

    task.make([("endless", hang)])
