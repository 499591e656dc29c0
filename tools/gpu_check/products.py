"""Checks products with weights of every type of block against float64."""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.kernels.activations import MOST_ROUNDED_ROWS
from runtime.kernels.pointwise import curve_of, silu_mul
from runtime.kernels.triton.pointwise import gate
from runtime.kernels.triton.products import experts_product, gated_product, product
from runtime.quant.block_types import BlockType
from runtime.quant.weight import PLANAR_TYPES, Compute
from tests.kernels.random_weights import random_weight
from tools.gpu_check.report import Task

ROWS = (1, 3, 8, 9, 33, 64, 100, 200)
DRY_ROWS = (1, 9)
# Numbers of outputs and elements. Elements are rounded up to whole blocks of the type.
SIZES = ((1, 32), (67, 288), (130, 2304))
_OUTS = 67  # of the size for all ways to compute, so that fewer kernels are compiled
# The type of x, and the largest error relative to the norms of both vectors.
WAYS = {
    Compute.EXACT: (torch.float32, 1e-5),
    Compute.FINE: (torch.bfloat16, 6e-3),
    Compute.FAST: (torch.bfloat16, 1.5e-2),
}
EXPERTS, USED = 5, 2


def check_products(task: Task) -> None:
    """Runs a check for each type, size and way to compute."""
    for type in _types(task):
        for outs, elements in SIZES[:1] if task.dry else SIZES:
            elements += -elements % type.block_elements
            for compute in (Compute.FINE,) if task.dry or outs != _OUTS else WAYS:
                name = f"product, {type.blocks.name}, {outs}x{elements}, {compute.name}"
                with task.report.guarding(name):
                    _check_product(task, name, type, (outs, elements), compute)


def _check_product(
    task: Task, name: str, type: BlockType, shape: tuple[int, int], compute: Compute
) -> None:
    """Checks every number of rows. One of up to MOST_ROUNDED_ROWS must have the same bits alone."""
    rows, (dtype, tolerance) = DRY_ROWS if task.dry else ROWS, WAYS[compute]
    weight = replace(random_weight(type.blocks, *shape), compute=compute)
    planar, dense = weight.in_planes(task.device), weight.dequantize().double()
    x = _random(rows[-1], shape[1]).to(dtype)
    errors, different = {}, []
    for count in rows:
        got = product(x[:count].to(task.device), planar).cpu()
        errors[count] = _error(got, x[:count].double(), dense)
        alone = product(x[count - 1 : count].to(task.device), planar).cpu()
        close = _error(alone, x[count - 1 : count].double(), dense) <= tolerance
        same = torch.equal(alone[0], got[-1])
        if not close or (not same and compute is not Compute.EXACT and count <= MOST_ROUNDED_ROWS):
            different.append(count)
    # The negated comparison also catches NaN.
    failing = {count: error for count, error in errors.items() if not error <= tolerance}
    worst = max(errors.values())
    task.report.check(
        name, not failing and not different, error=worst, failing=failing, not_as_alone=different
    )


def check_gated(task: Task) -> None:
    """Against the gate of the two products, whose kernels add in the same order."""
    curve, size = curve_of(silu_mul), 3 if task.dry else 67
    for type in _types(task):
        elements = max(288, type.block_elements)
        elements += -elements % type.block_elements
        for compute in (Compute.FINE,) if task.dry else WAYS:
            name = f"gated product, {type.blocks.name}, {compute.name}"
            with task.report.guarding(name):
                weight = replace(random_weight(type.blocks, 2 * size, elements), compute=compute)
                planar, errors = weight.in_planes(task.device), {}
                for rows in DRY_ROWS if task.dry else ROWS:
                    x = _random(rows, elements).to(task.device, WAYS[compute][0])
                    got = gated_product(x, planar, curve).double()
                    apart = gate(curve, *product(x, planar).chunk(2, dim=1)).double()
                    errors[rows] = ((got - apart).abs().max() / apart.abs().max()).item()
                tolerance = torch.finfo(WAYS[compute][0]).eps * 4
                failing = {rows: error for rows, error in errors.items() if not error <= tolerance}
                task.report.check(name, not failing, failing=failing)


def check_experts(task: Task) -> None:
    """Checks rows that all experts of a token share, and separate rows for each expert."""
    outs = EXPERTS * (3 if task.dry else 35)
    for type in _types(task):
        elements = max(96, type.block_elements)
        weight = random_weight(type.blocks, outs, elements + -elements % type.block_elements)
        weight = weight.unflatten(EXPERTS)
        for compute in (Compute.FINE,) if task.dry else WAYS:
            for tokens in (1,) if task.dry else (1, 2, 20, 200):
                name = f"experts, {type.blocks.name}, {compute.name}, {tokens} tokens"
                with task.report.guarding(name):
                    error = _experts_error(task, replace(weight, compute=compute), tokens)
                    task.report.check(name, error <= WAYS[compute][1], error=error)


def _experts_error(task: Task, weight, tokens: int) -> float:
    planar, dense = weight.in_planes(task.device), weight.dequantize().double()
    draw = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(EXPERTS, (tokens, USED), generator=draw)
    worst = 0.0
    for shape in ((tokens,), (tokens, USED)):
        x = _random(*shape, weight.shape[-1]).to(WAYS[weight.compute][0])
        arguments = (x.to(task.device), planar, chosen.to(task.device))
        got = experts_product(*arguments, bias=None, scale=None).cpu().flatten(0, 1)
        rows = x.double() if x.dim() == 3 else x.double()[:, None].expand(-1, USED, -1)
        for pair, expert in enumerate(chosen.flatten().tolist()):
            one = _error(got[pair : pair + 1], rows.flatten(0, 1)[pair : pair + 1], dense[expert])
            worst = one if one != one else max(worst, one)
            if worst != worst:
                return worst
    return worst


def _types(task: Task) -> list[BlockType]:
    types = list(PLANAR_TYPES.values())
    return types[:1] if task.dry else list(task.share(types))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _error(got: Tensor, x: Tensor, dense: Tensor) -> float:
    """The largest difference of got [rows, outs] and x dense^T, relative to the norms of the
    vectors."""
    size = x.norm(dim=1, keepdim=True) * dense.norm(dim=1)
    return ((got.double() - x @ dense.T).abs() / size.clamp(min=1e-30)).max().item()
