"""Checks norms, gates, curves and rotations against float64, with rows that are parts of longer
ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor

from runtime.kernels import pointwise as twins
from runtime.kernels.activations import RoundedActivations
from runtime.kernels.moments import row_moments_twin
from runtime.kernels.triton import pointwise
from runtime.kernels.triton.moments import row_moments
from runtime.kernels.triton.rounded import planes_of, rounded
from runtime.kernels.xielu import xielu_twin
from runtime.quant.weight import Compute
from tools.gpu_check.comparison import TOLERANCES, check_close
from tools.gpu_check.report import Check, Task

ROWS, ELEMENTS = 9, 1500
_XIELU = {"positive": 0.8, "negative": 1.1, "beta": 0.5, "eps": -1e-6}
# The kernel of rows on the device, and the twin of the same rows in float32 on a CPU.
Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def pointwise_checks(task: Task) -> Iterator[Check]:
    for dtype in (torch.float32,) if task.dry else TOLERANCES:
        for name, pair in (_norms() | _curves() | _rotations()).items():
            of = f"{name}, {dtype}"
            yield of, partial(_check, task, of, dtype, pair)
    for elements, rows in ((96, 1),) if task.dry else product((96, 1504, 4096, 5120), (1, 8)):
        name = f"rounded norms, {rows} rows of {elements}"
        yield name, partial(_check_rounded, task, rows, elements)
    axes = torch.arange(64) % 3
    for name, given, shape in (("angles", None, (9,)), ("angles on axes", axes, (3, 9))):
        yield name, partial(_check_angles, task, name, given, shape)


def _noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _norms() -> dict[str, Pair]:
    """Also those of parts of rows that have weights of their own, as heads have."""
    weight, bias = _noise(ELEMENTS, seed=1), _noise(ELEMENTS, seed=2)
    heads = weight.view(15, 100), bias.view(15, 100)

    def parts(x: Tensor) -> Tensor:
        return x.unflatten(1, (15, 100))

    return {
        "rms norm": (
            lambda x: pointwise.norm(x, weight.to(x.device), None, 1e-5),
            lambda x: twins.rms_norm_twin(x, weight, 1e-5),
        ),
        "layer norm": (
            lambda x: pointwise.norm(x, weight.to(x.device), bias.to(x.device), 1e-5),
            lambda x: twins.layer_norm_twin(x, weight, bias, 1e-5),
        ),
        "rms norms of parts": (
            lambda x: pointwise.norm(parts(x), heads[0].to(x.device), None, 1e-5),
            lambda x: twins.rms_norm_twin(parts(x), heads[0], 1e-5),
        ),
        "layer norms of parts": (
            lambda x: pointwise.norm(parts(x), heads[0].to(x.device), heads[1].to(x.device), 1e-5),
            lambda x: twins.layer_norm_twin(parts(x), *heads, 1e-5),
        ),
        "moments": (
            lambda x: torch.cat(row_moments(x), 1).to(x.dtype),
            lambda x: torch.cat(row_moments_twin(x), 1),
        ),
    }


def _curves() -> dict[str, Pair]:
    gates = {
        f"{name} gate": (
            lambda x, name=name: getattr(twins, f"{name}_mul")(x, x.flip(1)),
            lambda x, name=name: getattr(twins, f"{name}_mul_twin")(x, x.flip(1)),
        )
        for name in ("silu", "gelu", "gelu_erf", "gelu_quick", "relu", "relu_squared", "sigmoid")
    }
    return gates | {
        "softcap": (lambda x: twins.softcap(x, 3.0), lambda x: twins.softcap_twin(x, 3.0)),
        "xielu": (lambda x: pointwise.xielu(x, **_XIELU), lambda x: xielu_twin(x, **_XIELU)),
        "relu squared": (twins.relu_squared, twins.relu_squared_mul_twin),
        "factors": (lambda x: twins.mul(x, x[:1].expand_as(x)), lambda x: x * x[:1]),
    }


def _rotations() -> dict[str, Pair]:
    cos, sin = _noise(ROWS, 20, seed=3), _noise(ROWS, 20, seed=4)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(1, (15, 100))

    def rotated(x: Tensor, *, halves: bool) -> Tensor:
        return pointwise.rope(heads(x), cos.to(x.device), sin.to(x.device), halves=halves)

    tempered = partial(twins.temper_twin, beta=0.3, span=8.0, offset=1)
    positions = torch.arange(ROWS)
    return {
        "rope": (
            partial(rotated, halves=True), lambda x: twins.rope_halves_twin(heads(x), cos, sin),
        ),
        "rope, interleaved": (
            partial(rotated, halves=False),
            lambda x: twins.rope_interleaved_twin(heads(x), cos, sin),
        ),
        "temperature": (
            lambda x: tempered(heads(x), positions.to(x.device)),
            lambda x: tempered(heads(x), positions),
        ),
    }  # fmt: skip


def _check(task: Task, name: str, dtype: torch.dtype, pair: Pair) -> None:
    kernel, twin = pair
    x = _noise(ROWS, ELEMENTS + 3, seed=5).to(dtype)
    with _with_kernels_if_dry(task):
        got = kernel(x.to(task.device)[:, :ELEMENTS])
    check_close(task, name, got, twin(x[:, :ELEMENTS].float()))


@contextmanager
def _with_kernels_if_dry(task: Task) -> Iterator[None]:
    """In a dry run, treats the CPU as a device with kernels."""
    if not task.dry:
        yield
        return
    without_library = patch.object(twins, "library", lambda: None)
    with without_library, patch.object(twins, "has_kernels", lambda device: True):
        yield


def _check_rounded(task: Task, rows: int, elements: int) -> None:
    """Checks that norms and their integers have the same bits by one launch and by two."""
    x, y = (_noise(rows, elements, seed=seed).bfloat16() for seed in (6, 7))
    x, y, weight, bias = (each.to(task.device) for each in (x, y, x[0].float(), y[0].float()))
    of_rows = partial(pointwise.norm, x)
    of_sum = partial(pointwise.add_norm_, x.clone(), y, scale=1.0, dtype=x.dtype)
    for name, norm, addend, offset in (
        ("rms norm", of_rows, None, None), ("rms norm of a sum", of_sum, y, None),
        ("layer norm", of_rows, None, bias),
    ):  # fmt: skip
        expected = norm(weight=weight, bias=offset, eps=1e-5)
        integers = rounded(expected, planes_of(Compute.FINE))
        got = pointwise.rounded_norm_(
            x.clone(), addend, weight, offset, 1e-5, scale=1.0, rounding=Compute.FINE
        )
        assert isinstance(got, RoundedActivations)
        pairs = [(got.x, expected), (got.rounded.scales, integers.scales)]
        pairs += [(got.rounded.planes, integers.planes), (got.rounded.sums, integers.sums)]
        same = all(torch.equal(*pair) for pair in pairs)
        task.report.check(f"{name}, rounded, {rows} rows of {elements}", same)


def _check_angles(task: Task, name: str, axes: Tensor | None, shape: tuple[int, ...]) -> None:
    """Checks cosines and sines at far positions of one axis and of three."""
    pairs = 64
    frequencies = 1e4 ** -(torch.arange(pairs) / pairs)
    positions = torch.randint(1 << 20, shape, generator=torch.Generator().manual_seed(5))
    expected = twins.rotary_angles_twin(positions, frequencies, axes, 1.2)
    got = pointwise.rotary_angles(
        positions.to(task.device),
        frequencies.to(task.device),
        None if axes is None else axes.to(task.device),
        1.2,
    )
    check_close(task, name, torch.cat(got), torch.cat(expected))
