"""Norms, rotary embeddings and gates: twins against plain torch, fast paths against the twins."""

import pytest
import torch
import torch.nn.functional as F

from runtime.kernels.native import library
from runtime.kernels.pointwise import (
    rms_norm,
    rms_norm_twin,
    rope_interleaved,
    rope_interleaved_twin,
    silu_mul,
    silu_mul_twin,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def fast() -> None:
    if library() is None:
        pytest.skip("no C compiler here, so there is no fast path to test")


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (70, 2048), (2, 3, 80), (0, 16)])
@DTYPES
def test_rms_norm_agrees_with_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1])
    expected = F.rms_norm(x.float(), shape[-1:], weight, 1e-5).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    for norm in (rms_norm, rms_norm_twin):
        torch.testing.assert_close(norm(x, weight, 1e-5), expected, **tolerance)


def test_a_norm_has_the_same_bits_alone_and_in_any_batch() -> None:
    fast()
    x, weight = torch.randn(70, 1100), torch.randn(1100)
    alone = torch.cat([rms_norm(row, weight, 1e-6) for row in x.split(1)])
    for rows in range(1, 71):
        assert torch.equal(rms_norm(x[-rows:], weight, 1e-6), alone[-rows:])


@pytest.mark.parametrize(("heads", "dim", "rotated"), [(1, 8, 8), (32, 64, 64), (3, 80, 20)])
@pytest.mark.parametrize("tokens", [0, 1, 33])
@DTYPES
def test_rope_turns_neighbours_as_complex_numbers_do(
    heads: int, dim: int, rotated: int, tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn(tokens, heads, dim).to(dtype)
    angles = torch.rand(tokens, rotated // 2) * 6
    pairs = torch.view_as_complex(x[..., :rotated].float().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
    expected = torch.cat([turned.flatten(-2).to(dtype), x[..., rotated:]], dim=-1)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for rope in (rope_interleaved, rope_interleaved_twin):
        got = rope(x, angles.cos(), angles.sin())
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, **tolerance)
        assert torch.equal(got[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (40, 1000), (0, 16)])
@DTYPES
def test_silu_mul_agrees_with_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = (torch.randn(shape) * 10).to(dtype), torch.randn(shape).to(dtype)
    expected = (F.silu(gate.float()) * up.float()).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    for gated in (silu_mul, silu_mul_twin):
        torch.testing.assert_close(gated(gate, up), expected, **tolerance)


def test_silu_is_right_at_its_limits() -> None:
    gate = torch.tensor([[-1e30, -1000.0, -88.0, -20.0, -1e-20, 0.0, 1e-20, 20.0, 88.0, 1e30]])
    gate = torch.cat([gate, gate], dim=1)  # within a vector and in the rest
    torch.testing.assert_close(
        silu_mul(gate, torch.ones_like(gate)), F.silu(gate), rtol=1e-5, atol=1e-6
    )
    assert silu_mul(torch.full((1, 17), torch.nan), torch.ones(1, 17)).isnan().all()
