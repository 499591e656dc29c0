"""Measures what deterministic computing costs."""

from dataclasses import replace

import torch

from bench.make_model import write_model
from runtime.quant.weight import Compute
from tests.cuda.large_model import SHAPE
from tools.gpu_check import speed
from tools.gpu_check.models import load_decoder
from tools.gpu_check.report import Task


def run(task: Task) -> None:
    """Measures the time of steps relative to those without deterministic computing."""
    shape = speed.TINY if task.dry else replace(SHAPE, layers=32)
    path, taken = task.folder / "8B.gguf", []
    write_model(path, speed.LABEL, speed.vocabulary(task), shape)
    for deterministic in (False, True):
        decoder = load_decoder(
            path, task.device, torch.bfloat16, Compute.FINE, deterministic=deterministic
        )
        name = "8B, deterministic" if deterministic else "8B"
        taken.append(speed.step_seconds(task, name, decoder))
    path.unlink()
    for name, without in taken[0].items():
        task.report.figure(f"8B, {name}, time by that without", taken[1][name] / without, "")
