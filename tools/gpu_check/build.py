"""Compiles all kernels for this device: reports registers, and checks that none are spilled."""

import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from unittest.mock import patch

import torch

from serve_app.child_process import end_with_parent
from tests.cuda.compiled import Compiled, Specimen, compile_specimens
from tools.gpu_check.report import Task

_DRY_CAPABILITY = 90
_MODULES = (
    "tests.cuda.capabilities.specimens",
    "tests.cuda.capabilities.attention_specimens",
    "tests.cuda.pointwise_specimens",
    "tests.cuda.draw_specimens",
    "tests.cuda.selection_specimens",
)


def run(task: Task) -> None:
    modules = _MODULES[-1:] if task.dry else _MODULES
    capability = _DRY_CAPABILITY
    if not task.dry:
        major, minor = torch.cuda.get_device_capability(task.device)
        capability = 10 * major + minor
    kernels = [(module, name) for module in modules for name in specimens_of(module, capability)]
    context = multiprocessing.get_context("spawn")
    workers = 1 if task.dry else os.cpu_count()
    compiling = patch.dict(os.environ, TRITON_INTERPRET="0")  # for the processes that compile
    spawning = ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent)
    with compiling, spawning as pool:
        waiting = [(name, pool.submit(_compiled, m, name, capability)) for m, name in kernels]
        for name, future in waiting:
            with task.report.guarding(name):
                found = future.result()
                task.report.check(
                    name, found.stack == 0, registers=found.registers, spilled=found.stack,
                    shared=found.shared,
                )  # fmt: skip


def specimens_of(module: str, capability: int) -> Mapping[str, Specimen]:
    """The specimens in a module, one for each kernel to compile."""
    found: Mapping[str, Specimen] = import_module(module).specimens(capability)
    return found


def _compiled(module: str, name: str, capability: int) -> Compiled:
    specimen = specimens_of(module, capability)[name]
    return compile_specimens({name: specimen}, capability)[name]
