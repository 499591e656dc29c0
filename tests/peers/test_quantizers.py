"""The errors of our quantisers, compared with those of llama.cpp's on the same rows."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from model_zoo.convert.quantizers.rows import QUANTIZABLE, quantize
from runtime.quant.block_types import block_type
from runtime.quant.weight import dequantize
from tests.peers.llama_cpp_library import their_blocks

TYPES = sorted(QUANTIZABLE - {"F32", "F16", "BF16"})
SHAPE = (128, 2048)
ALLOWED = 1.05


def with_outliers(random: np.random.Generator) -> np.ndarray:
    return random.normal(size=SHAPE) * np.where(random.random(SHAPE) < 0.002, 50, 1)


def sparse(random: np.random.Generator) -> np.ndarray:
    return np.where(random.random(SHAPE) < 0.1, random.normal(size=SHAPE), 0.0)


def channels(random: np.random.Generator) -> np.ndarray:
    """Every column with a magnitude of its own, as in a trained matrix."""
    return random.normal(size=SHAPE) * random.lognormal(size=SHAPE[1])


ROWS: Mapping[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda random: random.normal(size=SHAPE),
    "student_3": lambda random: random.standard_t(3, SHAPE),
    "student_1.5": lambda random: random.standard_t(1.5, SHAPE),
    "laplace": lambda random: random.laplace(size=SHAPE),
    "lognormal": lambda random: random.lognormal(size=SHAPE),
    "signed_lognormal": lambda random: (
        random.lognormal(0, 1.5, SHAPE) * random.choice([-1.0, 1.0], SHAPE)
    ),
    "uniform": lambda random: random.uniform(-1, 1, SHAPE),
    "positive": lambda random: random.uniform(0.5, 1.5, SHAPE),
    "outliers": with_outliers,
    "sparse": sparse,
    "channels": channels,
}


def lost(blocks: Tensor, rows: Tensor, type_name: str) -> float:
    """Mean squared error."""
    return (dequantize(blocks, block_type(type_name)) - rows).double().square().mean().item()


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("type_name", TYPES)
def test_we_lose_no_more_than_llama_cpp(type_name, kind):
    weights = ROWS[kind](np.random.default_rng(7)) * 0.02
    rows = torch.from_numpy(weights.astype(np.float32))
    ours = lost(quantize(rows, type_name, tensor="rows"), rows, type_name)
    theirs = lost(their_blocks(rows, type_name), rows, type_name)
    assert 0 < ours <= ALLOWED * theirs, f"{ours / theirs:.3f} times what llama.cpp loses"


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1", "Q5_0", "Q5_1"])
def test_legacy_blocks_are_those_of_llama_cpp_but_for_ties(type_name):
    """Its compiler may fuse a product and a sum, so that a weight midway goes the other way."""
    rows = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    differs = quantize(rows, type_name, tensor="rows") != their_blocks(rows, type_name)
    assert differs.float().mean() < 1e-4
