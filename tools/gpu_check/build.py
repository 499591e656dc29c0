"""All kernels compiled for this device: registers, and that none are spilled."""

import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from unittest.mock import patch

import torch

from runtime.kernels.triton.groups import FORMS
from tests.cuda.compiled import Compiled, Specimen, compile_specimen
from tools.gpu_check.report import Task

_DRY_CAPABILITY = 90
_PRODUCTS = "tests.cuda.product_specimens"
_ATTENTION = "tests.cuda.attention_specimens"
_OTHERS = ("tests.cuda.pointwise_specimens", "tests.cuda.selection_specimens")


def run(task: Task) -> None:
    modules = _OTHERS[-1:] if task.dry else (_PRODUCTS, _ATTENTION, *_OTHERS)
    capability = _DRY_CAPABILITY
    if not task.dry:
        major, minor = torch.cuda.get_device_capability(task.device)
        capability = 10 * major + minor
    kernels = [(module, name) for module in modules for name in specimens_of(module)]
    context = multiprocessing.get_context("spawn")
    workers = 1 if task.dry else os.cpu_count()
    compiling = patch.dict(os.environ, TRITON_INTERPRET="0")  # of the processes that do
    with compiling, ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = [(name, pool.submit(_compiled, m, name, capability)) for m, name in kernels]
        for name, future in waiting:
            with task.report.guarding(name):
                found = future.result()
                task.report.check(
                    name, found.stack == 0, registers=found.registers, spilled=found.stack,
                    shared=found.shared,
                )  # fmt: skip


def specimens_of(module: str) -> Mapping[str, Specimen]:
    """Every kernel of a module of specimens, of products for all types of weights."""
    found = import_module(module)
    if module == _PRODUCTS:
        return found.specimens(FORMS)
    if module == _ATTENTION:
        makers = {"decode": found.decode, "merge": found.merge, "prefill": found.prefill}
        return {
            f"{kind} {name}": make(shape)
            for kind, make in makers.items()
            for name, shape in found.SHAPES.items()
        }
    return found.SPECIMENS


def _compiled(module: str, name: str, capability: int) -> Compiled:
    return compile_specimen(specimens_of(module)[name], capability)
