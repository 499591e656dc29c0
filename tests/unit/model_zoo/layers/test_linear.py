"""Gates of products that have the same input, with biases and additions of adapters."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.layers import linear
from model_zoo.layers.linear import FusedLinear, Linear
from model_zoo.layers.low_rank import LowRank
from runtime.kernels.pointwise import silu_mul
from runtime.quant.block_types import block_type
from runtime.quant.weight import Weight
from tests.kernels.random_weights import random_weight

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


def matrix(outs: int, ins: int) -> Weight:
    return random_weight(block_type("F32"), outs, ins, seed=outs)


def times(x: Tensor, weight: Weight) -> Tensor:
    return x @ weight.dequantize().T


GATES_AND_VALUES = Linear(matrix(10, 32))
BIAS = torch.linspace(-1, 1, 10)
ADDED = LowRank(matrix(2, 32), matrix(5, 2), 0.5)
PLAIN = FusedLinear((GATES_AND_VALUES,), ((5, 5),), ((), ()))


def expected(gates: Tensor, values: Tensor) -> Tensor:
    return F.silu(gates) * values


def test_gate_of_the_halves_of_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = times(X, GATES_AND_VALUES.weight).chunk(2, dim=1)
    monkeypatch.setattr(linear, "matmuls", None)  # the product and its gate are one operation
    torch.testing.assert_close(PLAIN.gated(X, silu_mul), expected(*halves))


def test_gate_of_separate_products() -> None:
    gates, values = Linear(matrix(5, 32)), Linear(matrix(6, 32).outputs(0, 5))
    fused = FusedLinear((gates, values), ((5,), (5,)), ((), ()))
    products = times(X, gates.weight), times(X, values.weight)
    torch.testing.assert_close(fused.gated(X, silu_mul), expected(*products))


def test_biases_are_added_before_the_gate() -> None:
    fused = replace(PLAIN, parts=(replace(GATES_AND_VALUES, bias=BIAS),))
    halves = (times(X, GATES_AND_VALUES.weight) + BIAS).chunk(2, dim=1)
    torch.testing.assert_close(fused.gated(X, silu_mul), expected(*halves))


FACTOR = torch.tensor([0.25])


@pytest.mark.parametrize("at", [0, 1])
def test_factors_multiply_the_product_before_biases_are_added(at: int) -> None:
    weight, factors, biases = matrix(10, 32), [None, None], [BIAS[:5], None]
    factors[at] = FACTOR.expand(5)
    fused = FusedLinear.of([(weight, 2)], (5, 5), biases, ((), ()), factors)
    halves = list(times(X, weight).chunk(2, dim=1))
    halves[at] = halves[at] * FACTOR
    halves[0] = halves[0] + BIAS[:5]
    torch.testing.assert_close(fused(X), tuple(halves))
    torch.testing.assert_close(fused.gated(X, silu_mul), expected(*halves))
    plain = FusedLinear.of([(weight, 2)], (5, 5), [None, None], ((), ()), factors)
    halves[0] = halves[0] - BIAS[:5]
    torch.testing.assert_close(plain.gated(X, silu_mul), expected(*halves))


@pytest.mark.parametrize("added", [((ADDED,), ()), ((), (ADDED,))], ids=["gates", "values"])
def test_adapters_are_added_before_the_gate(added: tuple[tuple[LowRank, ...], ...]) -> None:
    low_rank = times(times(X, ADDED.down), ADDED.up) * ADDED.scale
    halves = times(X, GATES_AND_VALUES.weight).chunk(2, dim=1)
    sums = [half + low_rank * len(each) for half, each in zip(halves, added, strict=True)]
    fused = replace(PLAIN, added=added)
    torch.testing.assert_close(fused.gated(X, silu_mul), expected(*sums))
