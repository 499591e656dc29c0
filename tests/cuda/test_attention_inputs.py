"""The fused kernel before attention in Triton's interpreter, against its single operations."""

from itertools import product

import pytest
import torch
from torch import Tensor

from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Pairs, Rotation
from runtime.kernels.attention_inputs import HeadNorms, prepare_attention_twin
from runtime.kernels.triton.attention_inputs import prepare_attention
from runtime.kv.cache_types import CacheType
from runtime.worker.model import AttentionPlan
from tests.cuda.test_attention import empty_pages

HEADS, KV_HEADS, TOKENS = 6, 3, 5
DRAW = torch.Generator().manual_seed(8)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW)


def norms_of(kinds: str, dims: tuple[int, int]) -> HeadNorms:
    """One letter a norm: weighted, plain or absent."""
    sizes = dims[0], dims[0], dims[1], dims[0], dims[0]
    norms = (
        None if kind == "a" else RMSNorm(noise(size) if kind == "w" else None, 1e-3)
        for kind, size in zip(kinds, sizes, strict=True)
    )
    return HeadNorms(*norms)


def rotation_of(pairs: Pairs | None, rotated: int) -> Rotation | None:
    return pairs and Rotation(noise(TOKENS, rotated // 2), noise(TOKENS, rotated // 2), pairs)


@pytest.mark.parametrize("kinds", ["aaaaa", "wwaaa", "wwppp", "aaaww", "aaawp"])
@pytest.mark.parametrize(
    "pairs, rotated", [(None, 0), *product(Pairs, (80, 26))], ids=lambda value: str(value)
)
def test_norms_rotation_and_write_are_those_of_the_twins(
    kinds: str, pairs: Pairs | None, rotated: int
) -> None:
    compare(CacheType.FLOAT32, norms_of(kinds, (80, 72)), rotation_of(pairs, rotated))


@pytest.mark.parametrize(
    "type", [CacheType.FLOAT16, CacheType.Q8_0, CacheType.Q4_0, CacheType.FP8], ids=str
)
def test_every_type_of_cache_is_written(type: CacheType) -> None:
    compare(type, norms_of("wwwaa", (80, 72)), rotation_of(Pairs.NEOX, 80))


def compare(type: CacheType, norms: HeadNorms, rotation: Rotation | None) -> None:
    wide = noise(TOKENS, HEADS + KV_HEADS, 85)  # heads are parts of longer rows
    queries, keys = wide[:, :HEADS, :80], wide[:, HEADS:, :80]
    stored = keys, noise(TOKENS, KV_HEADS, 72)
    plan = AttentionPlan(*[torch.zeros(0)] * 4, torch.tensor([3, 34, 0, 7, 12]), ())
    got, expected = (empty_pages(type, KV_HEADS, (80, 72)) for _ in range(2))
    result = prepare_attention(queries, stored, norms, rotation, got, plan)
    twin = prepare_attention_twin(queries, stored, norms, rotation, expected, plan)
    torch.testing.assert_close(result, twin, rtol=1e-5, atol=1e-5)
    # A number at the boundary of two codes or halves may become either.
    close = {"rtol": 2e-3, "atol": 1} if type.quantized else {"rtol": 1e-3, "atol": 1e-5}
    if type is CacheType.FP8:
        close = {"rtol": 2.0**-3, "atol": 2.0**-9}
    for one, other in ((got.keys, expected.keys), (got.values, expected.values)):
        torch.testing.assert_close(one.float(), other.float(), **close)
    result = prepare_attention(queries, None, norms, rotation, got, plan)
    torch.testing.assert_close(result, twin, rtol=1e-5, atol=1e-5)
