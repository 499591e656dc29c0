"""Residuals of several streams, and cut gates: the kernels against their twins."""

import pytest
import torch
from torch import Tensor

from runtime.kernels import streams as kernels
from tests.kernels.native_kernels import require_native_kernels

SHAPES = [(1, 4, 64), (3, 4, 37), (2, 1, 5), (9, 3, 2048)]


@pytest.fixture(autouse=True)
def native() -> None:
    require_native_kernels()
    torch.manual_seed(1)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "streams", "n"), SHAPES)
def test_streams_are_mixed_and_corrected(tokens: int, streams: int, n: int) -> None:
    x, mixture = torch.randn(tokens, streams, n), torch.randn(tokens, streams, streams)
    mixed = kernels.mixed_streams(x, mixture)
    assert_close(mixed, kernels.mixed_streams_twin(x, mixture))
    value, shares = torch.randn(tokens, 2, n)[:, 1], torch.randn(tokens, streams)
    for active in {0, streams - 1}:
        found = kernels.corrected_streams_(x.clone(), value, shares, active=active)
        expected = kernels.corrected_streams_twin_(x.clone(), value, shares, active=active)
        assert_close(found, expected)
    keys, queries, value = torch.randn(tokens, streams, n), x, value.contiguous()
    queries[:1] = 0
    assert_close(
        kernels.gated_streams(keys, queries, value),
        kernels.gated_streams_twin(keys, queries, value),
    )
    found = kernels.add_shares_(x.clone(), value, shares)
    assert_close(found, kernels.add_shares_twin_(x.clone(), value, shares))
    assert_close(
        kernels.add_to_others_(x.clone(), value), kernels.add_to_others_twin_(x.clone(), value)
    )


@pytest.mark.parametrize(("tokens", "streams", "n"), SHAPES)
def test_rows_are_scaled_and_cut(tokens: int, streams: int, n: int) -> None:
    """Also rows that are strides apart, and smaller than the bound of their mean square."""
    x = torch.randn(tokens, streams, n)[:, 0] * torch.logspace(-6, 1, tokens)[:, None]
    other = torch.randn(tokens, streams, n)[:, -1]
    found = kernels.match_rms_(x.clone(), other, least=1e-5)
    assert_close(found, kernels.match_rms_twin_(x.clone(), other, least=1e-5))
    for bound in (0.0, 1.6448):
        found = kernels.cut_low(other, bound=bound)
        assert_close(found, kernels.cut_low_twin(other, bound=bound))
        assert (found == 0).any() or n < 9


def test_a_row_depends_on_no_other_row() -> None:
    x, mixture = torch.randn(5, 4, 33), torch.randn(5, 4, 4)
    assert torch.equal(
        kernels.mixed_streams(x, mixture)[3:4], kernels.mixed_streams(x[3:4], mixture[3:4])
    )
    rows = x[:, 0].contiguous()
    assert torch.equal(kernels.cut_low(rows, bound=0.5)[2:3], kernels.cut_low(rows[2:3], bound=0.5))


def test_impossible_arguments_are_refused() -> None:
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="stream 3 of 3"):
        kernels.corrected_streams_(x, x[:, 0], x[:, :, 0].contiguous(), active=3)
    with pytest.raises(ValueError, match="a kernel takes"):
        kernels.mixed_streams(x, torch.randn(2, 3, 2))
