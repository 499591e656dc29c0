"""Measures a mixture of experts of Qwen3-30B-A3B's shape with fewer layers, like `speed`."""

from dataclasses import replace
from functools import partial

import torch

from bench.make_model import MOE, MOE_SHAPE, Shape
from runtime.kernels.triton.products import experts_product
from runtime.quant.block_types import block_type
from runtime.quant.weight import Compute
from tests.kernels.random_weights import random_weight
from tools.gpu_check import speed
from tools.gpu_check.ceilings import measure, recorded_seconds
from tools.gpu_check.report import Task


def run(task: Task) -> None:
    small = replace(speed.TINY, experts=4, experts_used=2)
    shape = small if task.dry else MOE_SHAPE
    name = f"experts, {shape.layers} layers"
    task.make([(name, partial(speed.measure_model, task, name, shape, MOE))])
    task.make([("gates of experts", partial(_measure_gates, task, shape))])


def _measure_gates(task: Task, shape: Shape) -> None:
    ceilings = measure(task)
    outs = 2 if task.dry else shape.feed_forward
    flat = random_weight(block_type("Q4_K"), shape.experts * outs, shape.hidden)
    weight = replace(flat.unflatten(shape.experts), compute=Compute.FINE)
    planar = weight.in_planes(task.device)
    draw = torch.Generator().manual_seed(1)
    for tokens in (1,) if task.dry else (1, 8, 64, 256):
        name = f"gate of experts Q4_K, {tokens} tokens"
        with task.report.guarding(name):
            x = torch.randn(tokens, shape.hidden, device=task.device).to(speed.dtype_of(task))
            scores = torch.rand(tokens, shape.experts, generator=draw)
            chosen = scores.topk(shape.experts_used).indices
            used = len(chosen.unique()) / shape.experts
            places = chosen.to(task.device)
            call = partial(experts_product, x, planar, places, None, None)
            taken = recorded_seconds([call], task.device)
            operations = 2 * chosen.numel() * outs * shape.hidden
            nbytes = used * planar.nbytes
            least = max(nbytes / ceilings.bytes_s, operations / ceilings.operations_s)
            task.report.figure(f"{name}, share of the ceiling", least / taken, "")
