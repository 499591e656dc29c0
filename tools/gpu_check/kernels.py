"""Checks every kernel on the device against float64: with poisoned results, alone and in
batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor

from runtime.kernels import pointwise as twins
from runtime.kernels.activations import RoundedActivations
from runtime.kernels.selection import highest_twin
from runtime.kernels.triton import delta as delta_kernels
from runtime.kernels.triton import pointwise
from runtime.kernels.triton.attention import paged_attention
from runtime.kernels.triton.rounded import planes_of, rounded
from runtime.kernels.triton.selection import highest
from runtime.kernels.triton.state_space import state_space
from runtime.kv.cache_types import CacheType
from runtime.quant.weight import Compute
from runtime.worker.model import LayerPages
from tests.kernels import test_attention as scenes
from tests.kernels.sequence_steps import GatedDelta, Kernels, Mamba2, Rule, Sequences
from tools.gpu_check.draws import check_draws
from tools.gpu_check.products import check_experts, check_gated, check_products
from tools.gpu_check.report import Task

# (batch, shape, window, options): names of tests/kernels/test_attention.py
SCENES = (
    ("decoding", "three share, odd sizes", None, "plain"),
    ("decoding", "four share", 20, "capped, sinks"),
    ("decoding far away", "four share", None, "sinks"),
    ("prefill", "four share", None, "sinks"),
    ("prefill and decode", "all share, tiny", 33, "capped"),
)
HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))
# The largest error of numbers of about 1.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
Pointwise = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def run(task: Task) -> None:
    with poisoned():
        _check_attention(task)
        checks = (
            _check_pointwise, _check_rounded_norms, _check_angles, _check_delta,
            _check_state_space, check_draws, _check_highest,
        )  # fmt: skip
        for check in task.share(checks):
            check(task)
        check_products(task)  # last, because most of the time is theirs
        check_gated(task)
        check_experts(task)


def _check_highest(task: Task) -> None:
    with task.report.guarding("highest"):
        values = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).round(decimals=1)
        got = highest(values.to(task.device), 8).cpu()
        task.report.check("highest", torch.equal(got, highest_twin(values, 8)))


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are filled with NaN, so that numbers that a kernel leaves unwritten are NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.ones(1).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _check_attention(task: Task) -> None:
    types = [CacheType.FLOAT32] if task.dry else list(CacheType)
    cases = list(product(SCENES[: 1 if task.dry else None], types))
    for (batch, shape, window, options), type in task.share(cases):
        _check_scene(task, batch, shape, window, options, type)
    for dims in task.share(HEADS[: 1 if task.dry else None]):
        with patch.dict(scenes.SHAPES, {f"dims {dims}": (4, 2, *dims, 16)}):
            for batch in ("decoding",) if task.dry else ("decoding", "prefill"):
                _check_scene(task, batch, f"dims {dims}", None, "plain", CacheType.FLOAT16)


def _check_scene(
    task: Task, batch: str, shape: str, window: int | None, options: str, type: CacheType
) -> None:
    name = f"attention, {batch}, {shape}, {options}, {type.value}"
    with task.report.guarding(name):
        queries, pages, plan = scenes.scene(batch, shape, window=window, type=type)
        chosen = scenes.options_of(options, queries.shape[1])
        narrow = torch.float16 if type is CacheType.FLOAT16 else torch.bfloat16
        dtypes = [torch.float32] if type is CacheType.FLOAT32 else [torch.float32, narrow]
        for dtype in dtypes[-1:] if task.dry else dtypes:
            narrowed = queries.to(dtype)
            expected = scenes.by_definition(narrowed, pages, plan, **chosen)
            sinks = None if chosen["sinks"] is None else chosen["sinks"].to(task.device)
            moved = _moved(pages, task.device), plan.to(task.device)
            got = paged_attention(narrowed.to(task.device), *moved, **chosen | {"sinks": sinks})
            _check_close(task, f"{name}, {dtype}", got, expected)


def _moved(pages: LayerPages, device: torch.device) -> LayerPages:
    return LayerPages(pages.keys.to(device), pages.values.to(device), pages.group, pages.quantized)


def _check_close(task: Task, name: str, got: Tensor, expected: Tensor) -> None:
    """Checks that `got` is close to `expected`; NaN is not close to anything."""
    scale = max(1.0, expected.abs().max().item())
    error = (got.cpu().double() - expected.double()).abs().max().item() / scale
    task.report.check(name, error <= TOLERANCES[got.dtype], error=error)


def _check_pointwise(task: Task) -> None:
    """Checks norms, gates and rotations with rows that are parts of longer ones."""
    draw = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(1500, generator=draw), torch.randn(1500, generator=draw)
    cos, sin = torch.randn(9, 20, generator=draw), torch.randn(9, 20, generator=draw)
    calls: dict[str, Pointwise] = {
        "rms norm": (
            lambda x: pointwise.norm(x, weight.to(x.device), None, 1e-5),
            lambda x: twins.rms_norm_twin(x, weight, 1e-5),
        ),
        "layer norm": (
            lambda x: pointwise.norm(x, weight.to(x.device), bias.to(x.device), 1e-5),
            lambda x: twins.layer_norm_twin(x, weight, bias, 1e-5),
        ),
        "silu gate": (
            lambda x: twins.silu_mul(x, x.flip(1)), lambda x: twins.silu_mul_twin(x, x.flip(1)),
        ),
        "gelu gate": (
            lambda x: twins.gelu_mul(x, x.flip(1)), lambda x: twins.gelu_mul_twin(x, x.flip(1)),
        ),
        "softcap": (lambda x: twins.softcap(x, 3.0), lambda x: twins.softcap_twin(x, 3.0)),
        "rope": (
            lambda x: pointwise.rope(
                x.unflatten(1, (15, 100)), cos.to(x.device), sin.to(x.device), halves=True
            ),
            lambda x: twins.rope_halves_twin(x.unflatten(1, (15, 100)), cos, sin),
        ),
        "rope, interleaved": (
            lambda x: pointwise.rope(
                x.unflatten(1, (15, 100)), cos.to(x.device), sin.to(x.device), halves=False
            ),
            lambda x: twins.rope_interleaved_twin(x.unflatten(1, (15, 100)), cos, sin),
        ),
    }  # fmt: skip
    for dtype in (torch.float32,) if task.dry else tuple(TOLERANCES):
        x = torch.randn(9, 1503, generator=draw).to(dtype)
        for name, (kernel, twin) in calls.items():
            with task.report.guarding(name), _with_kernels_if_dry(task):
                wide = x.to(task.device)
                expected = twin(x[:, :1500].float())
                _check_close(task, f"{name}, {dtype}", kernel(wide[:, :1500]), expected)


def _check_rounded_norms(task: Task) -> None:
    """Checks that norms and their integers have the same bits by one launch and by two."""
    draw = torch.Generator().manual_seed(4)
    for elements, rows in ((96, 1),) if task.dry else product((96, 1504, 4096, 5120), (1, 8)):
        x, y = (torch.randn(rows, elements, generator=draw).bfloat16() for _ in range(2))
        x, y, weight, bias = (each.to(task.device) for each in (x, y, x[0].float(), y[0].float()))
        of_rows = partial(pointwise.norm, x)
        of_sum = partial(pointwise.add_norm_, x.clone(), y, scale=1.0, dtype=x.dtype)
        for name, norm, addend, offset in (
            ("rms norm", of_rows, None, None), ("rms norm of a sum", of_sum, y, None),
            ("layer norm", of_rows, None, bias),
        ):  # fmt: skip
            name = f"{name}, rounded, {rows} rows of {elements}"
            with task.report.guarding(name):
                expected = norm(weight=weight, bias=offset, eps=1e-5)
                integers = rounded(expected, planes_of(Compute.FINE))
                got = pointwise.rounded_norm_(
                    x.clone(), addend, weight, offset, 1e-5, scale=1.0, rounding=Compute.FINE
                )
                assert isinstance(got, RoundedActivations)
                pairs = [(got.x, expected), (got.rounded.scales, integers.scales)]
                pairs += [(got.rounded.planes, integers.planes), (got.rounded.sums, integers.sums)]
                task.report.check(name, all(torch.equal(*pair) for pair in pairs))


def _check_angles(task: Task) -> None:
    """Checks cosines and sines at far positions of one axis and of three."""
    draw, pairs = torch.Generator().manual_seed(5), 64
    frequencies, axes = 1e4 ** -(torch.arange(pairs) / pairs), torch.arange(pairs) % 3
    for name, given, shape in (("angles", None, (9,)), ("angles on axes", axes, (3, 9))):
        with task.report.guarding(name):
            positions = torch.randint(1 << 20, shape, generator=draw)
            expected = twins.rotary_angles_twin(positions, frequencies, given, 1.2)
            there = [None if x is None else x.to(task.device) for x in (frequencies, given)]
            got = pointwise.rotary_angles(positions.to(task.device), *there, 1.2)
            _check_close(task, name, torch.cat(got), torch.cat(expected))


@contextmanager
def _with_kernels_if_dry(task: Task) -> Iterator[None]:
    """In a dry run, treats the CPU as a device with kernels."""
    if not task.dry:
        yield
        return
    without_library = patch.object(twins, "library", lambda: None)
    with without_library, patch.object(twins, "has_kernels", lambda device: True):
        yield


def _check_delta(task: Task) -> None:
    kernels = (delta_kernels.short_convolution, delta_kernels.gated_delta)
    _check_recurrent(task, "delta", GatedDelta(), kernels)
    _check_recurrent(task, "delta of elements", GatedDelta(by_element=True), kernels)


def _check_state_space(task: Task) -> None:
    kernels = (delta_kernels.short_convolution, state_space)
    _check_recurrent(task, "state space", Mamba2(), kernels)


def _check_recurrent(task: Task, name: str, rule: Rule, kernels: Kernels) -> None:
    """Checks recurrent layers against `transformers`, in steps of several sequences."""
    for shape in ("one_head",) if task.dry else rule.shapes:
        of = f"{name}, {shape}"
        with task.report.guarding(of):
            sequences = Sequences(rule, shape, [7, 3], device=str(task.device))
            for number, found in sequences.steps([{0: 4}, {1: 3, 0: 3}], kernels).items():
                expected = sequences.expected(number)
                for what, one, other in zip(("convolution", "rule"), found, expected, strict=True):
                    _check_close(task, f"{of}, {number}, {what}", one, other)
