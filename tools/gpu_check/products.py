"""Checks products with weights of every type of block against float64."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from runtime.kernels.activations import MOST_ROUNDED_ROWS
from runtime.kernels.pointwise import curve_of, silu_mul
from runtime.kernels.triton.pointwise import gate
from runtime.kernels.triton.products import experts_product, gated_product, product
from runtime.quant.block_types import BlockType
from runtime.quant.weight import PLANAR_TYPES, Compute, Weight
from tests.kernels.random_weights import random_weight
from tools.gpu_check.comparison import largest
from tools.gpu_check.report import Check, Task

# By vectors, by fragments of 16, 32 and 64 rows, by wide tiles of 128 and 256.
ROWS = (1, 3, 8, 9, 20, 33, 64, 100, 128, 129, 256)
DRY_ROWS = (1, 9)
# Numbers of outputs and elements. Elements are rounded up to whole blocks of the type.
SIZES = ((1, 32), (67, 288), (130, 2304))
_OUTS = 67  # of the size for all ways to compute, so that fewer kernels are compiled
EXPERTS, USED = 5, 2
# Tokens of experts' rows, whose mean number of pairs takes bundles of 16, 32 and 64.
_BUNDLED_TOKENS = (40, 80, 150)


@dataclass(frozen=True)
class Way:
    """compute and type of x; the largest error relative to the norms of both vectors; the type to
    which x is rounded, if it is another."""

    compute: Compute
    dtype: torch.dtype
    tolerance: float
    operands: torch.dtype | None = None

    @property
    def name(self) -> str:
        types = filter(None, (self.dtype, self.operands))
        return " ".join([self.compute.name, *(str(type).removeprefix("torch.") for type in types)])


# The first one is checked of all sizes.
WAYS = (
    Way(Compute.FINE, torch.bfloat16, 6e-3),
    Way(Compute.FAST, torch.bfloat16, 1.5e-2),
    Way(Compute.EXACT, torch.float32, 1e-5),
    Way(Compute.EXACT, torch.bfloat16, 6e-3),
    Way(Compute.FINE, torch.float16, 1e-3),
    Way(Compute.FINE, torch.float32, 6e-3, torch.bfloat16),
)


def product_checks(task: Task) -> Iterator[Check]:
    """A check for each type, size and way to compute; those of the size for all ways come last."""
    for outs, elements in sorted(SIZES[:1] if task.dry else SIZES, key=lambda s: s[0] == _OUTS):
        for type in _types(task):
            size = outs, elements + -elements % type.block_elements
            for way in WAYS if outs == _OUTS else WAYS[:1]:
                name = f"product, {type.name}, {size[0]}x{size[1]}, {way.name}"
                yield name, partial(_check_product, task, name, type, size, way)


def _check_product(
    task: Task, name: str, type: BlockType, shape: tuple[int, int], way: Way
) -> None:
    """Checks every number of rows. One of up to MOST_ROUNDED_ROWS must have the same bits alone."""
    rows, tolerance = DRY_ROWS if task.dry else ROWS, way.tolerance
    weight = replace(random_weight(type, *shape), compute=way.compute)
    planar, dense = weight.in_planes(task.device), weight.dequantize().double()
    x = _random(rows[-1], shape[1]).to(way.dtype)
    errors, different = {}, []
    for count in rows:
        got = product(x[:count].to(task.device), planar, way.operands).cpu()
        errors[count] = _error(got, x[:count].double(), dense)
        alone = product(x[count - 1 : count].to(task.device), planar, way.operands).cpu()
        close = _error(alone, x[count - 1 : count].double(), dense) <= tolerance
        same = torch.equal(alone[0], got[-1])
        rounded = way.compute is not Compute.EXACT and count <= MOST_ROUNDED_ROWS
        if not close or (rounded and not same):
            different.append(count)
    # The negated comparison also catches NaN.
    failing = {count: error for count, error in errors.items() if not error <= tolerance}
    task.report.check(
        name, not failing and not different, error=largest(errors.values()), failing=failing,
        not_as_alone=different,
    )  # fmt: skip


def gated_checks(task: Task) -> Iterator[Check]:
    for type in _types(task):
        for way in _ways_of_models(task):
            name = f"gated product, {type.name}, {way.name}"
            yield name, partial(_check_gated, task, name, type, way)


def _check_gated(task: Task, name: str, type: BlockType, way: Way) -> None:
    """Against the gate of the two products, whose kernels add in the same order."""
    curve, size = silu_curve(), 3 if task.dry else 67
    elements = max(288, type.block_elements)
    elements += -elements % type.block_elements
    weight = replace(random_weight(type, 2 * size, elements), compute=way.compute)
    planar, errors = weight.in_planes(task.device), {}
    for rows in DRY_ROWS if task.dry else ROWS:
        x = _random(rows, elements).to(task.device, way.dtype)
        got = gated_product(x, planar, curve).double()
        apart = gate(curve, *product(x, planar).chunk(2, dim=1)).double()
        errors[rows] = ((got - apart).abs().max() / apart.abs().max()).item()
    tolerance = torch.finfo(way.dtype).eps * 4
    failing = {rows: error for rows, error in errors.items() if not error <= tolerance}
    task.report.check(name, not failing, failing=failing)


def silu_curve() -> int:
    """The number of the curve of SiLU in kernels with gates."""
    curve = curve_of(silu_mul)
    assert curve is not None
    return curve


def expert_checks(task: Task) -> Iterator[Check]:
    """Rows that all experts of a token share, and separate rows for each expert."""
    for type in _types(task):
        for way in _ways_of_models(task):
            name = f"experts, {type.name}, 96, {way.name}"
            counts = (1,) if task.dry else (1, 2, 20, 200)
            yield name, partial(_check_experts, task, name, type, (35, 96), counts, way)
        if not task.dry:  # warps divide the inner elements
            name = f"experts, {type.name}, 2304, shifted"
            yield name, partial(
                _check_experts, task, name, type, (35, 2304), _BUNDLED_TOKENS, WAYS[0],
                shifted=True,
            )  # fmt: skip


def _ways_of_models(task: Task) -> Sequence[Way]:
    return WAYS[:1] if task.dry else [way for way in WAYS if way.operands is None]


def _check_experts(
    task: Task,
    name: str,
    type: BlockType,
    size: tuple[int, int],
    counts: Sequence[int],
    way: Way,
    *,
    shifted: bool = False,
) -> None:
    """size: outputs of an expert and elements. shifted: with a bias of each expert and a factor of
    each pair."""
    outs, elements = 3 if task.dry else size[0], size[1] + -size[1] % type.block_elements
    weight = random_weight(type, EXPERTS * outs, elements).unflatten(EXPERTS)
    weight = replace(weight, compute=way.compute)
    for tokens in counts:
        bias = _random(EXPERTS, outs) if shifted else None
        scale = _random(tokens, USED).abs() + 0.5 if shifted else None
        error = _experts_error(task, weight, tokens, way.dtype, bias, scale)
        task.report.check(f"{name}, {tokens} tokens", error <= way.tolerance, error=error)


def _experts_error(
    task: Task,
    weight: Weight,
    tokens: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    scale: Tensor | None,
) -> float:
    planar, dense = weight.in_planes(task.device), weight.dequantize().double()
    draw = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(EXPERTS, (tokens, USED), generator=draw)
    there = [None if given is None else given.to(task.device) for given in (bias, scale)]
    errors = list[float]()
    for shape in ((tokens,), (tokens, USED)):
        x = _random(*shape, weight.shape[-1]).to(dtype)
        got = experts_product(x.to(task.device), planar, chosen.to(task.device), *there).cpu()
        rows = x.double() if x.dim() == 3 else x.double()[:, None].expand(-1, USED, -1)
        rows = rows if scale is None else rows * scale[..., None]
        result = got.double() if bias is None else got.double() - bias[chosen]
        for pair, expert in enumerate(chosen.flatten().tolist()):
            one = slice(pair, pair + 1)
            errors.append(_error(result.flatten(0, 1)[one], rows.flatten(0, 1)[one], dense[expert]))
    return largest(errors)


def _types(task: Task) -> list[BlockType]:
    """Those of files whose weights have planes on the device."""
    types = [type.blocks for type in PLANAR_TYPES.values() if type.blocks is not None]
    return types[:1] if task.dry else types


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _error(got: Tensor, x: Tensor, dense: Tensor) -> float:
    """The largest difference of got [rows, outs] and x dense^T, relative to the norms of the
    vectors."""
    size = x.norm(dim=1, keepdim=True) * dense.norm(dim=1)
    return ((got.double() - x @ dense.T).abs() / size.clamp(min=1e-30)).max().item()
