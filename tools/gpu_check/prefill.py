"""Prefill of a model in blocks by that of the same model in bfloat16; fewer layers are enough."""

from dataclasses import replace

import torch

from bench.make_model import Shape, write_model
from runtime.quant.weight import Compute
from tests.cuda.large_model import SHAPE
from tools.gpu_check import speed
from tools.gpu_check.models import load_decoder
from tools.gpu_check.report import Task

_LAYERS = 8


def run(task: Task) -> None:
    shape = speed.TINY if task.dry else replace(SHAPE, layers=_LAYERS)
    taken = {label: _prefill_s(task, label, shape) for label in ("BF16", speed.LABEL)}
    name = f"8B, {shape.layers} layers, time of prefill by that in bfloat16"
    task.report.figure(name, taken[speed.LABEL] / taken["BF16"], "", ("at most", 1.15))


def _prefill_s(task: Task, label: str, shape: Shape) -> float:
    """Of a prompt that fills a step."""
    path, length = task.folder / f"{label}.gguf", speed.load_of(task).step_tokens
    write_model(path, label, speed.vocabulary(task), shape)
    decoder = load_decoder(path, task.device, torch.bfloat16, Compute.FINE)
    path.unlink()
    with speed.prefill_engine(task, decoder) as engine:
        taken = speed.prefill_s(engine, length)
    task.report.check(f"{label}, prompts are computed", taken > 0)
    task.report.figure(f"{label}, {shape.layers} layers, prefill", length / taken, "tokens/s")
    return taken
