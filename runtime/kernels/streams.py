"""Residuals of several streams, and gates that are cut at a bound relative to their row."""

import torch
from torch import Tensor

from runtime.kernels.moments import row_moments
from runtime.kernels.native import address, library, row_address
from runtime.kernels.pointwise import add_


def mixed_streams(x: Tensor, mixture: Tensor) -> Tensor:
    """x [tokens, streams, n], mixture [tokens, streams, streams] -> like x: stream s is x_s plus
    the sum of mixture[s, k] x_k over all k."""
    if not _is_native(x, mixture) or (kernels := library()) is None:
        return mixed_streams_twin(x, mixture)
    tokens, streams, n = x.shape
    result = torch.empty_like(x)
    kernels.caravan_mix_streams(
        address(x, x.shape), address(mixture, (tokens, streams, streams)), tokens, streams, n,
        result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result


def corrected_streams_(x: Tensor, value: Tensor, shares: Tensor, *, active: int) -> Tensor:
    """x [tokens, streams, n], changed: each stream plus 1 + its share of the difference between
    value [tokens, n] and the stream `active`. shares [tokens, streams]."""
    if not _is_native(x, value, shares) or (kernels := library()) is None:
        return corrected_streams_twin_(x, value, shares, active=active)
    tokens, streams, n = x.shape
    if not 0 <= active < streams:
        raise ValueError(f"stream {active} of {streams}")
    kernels.caravan_correct_streams(
        address(x, x.shape), row_address(value, (tokens, n), torch.float32), value.stride(0),
        address(shares, (tokens, streams)), tokens, streams, active, n, torch.get_num_threads(),
    )  # fmt: skip
    return x


def add_shares_(x: Tensor, value: Tensor, shares: Tensor) -> Tensor:
    """x [tokens, streams, n], changed: each stream plus its share, of shares [tokens, streams], of
    value [tokens, n]."""
    if not _is_native(x, value, shares) or (kernels := library()) is None:
        return add_shares_twin_(x, value, shares)
    tokens, streams, n = x.shape
    kernels.caravan_add_shares(
        address(x, x.shape), row_address(value, (tokens, n), torch.float32), value.stride(0),
        address(shares, (tokens, streams)), tokens, streams, n, torch.get_num_threads(),
    )  # fmt: skip
    return x


def gated_streams(keys: Tensor, queries: Tensor, value: Tensor) -> Tensor:
    """keys, queries [tokens, streams, n], value [tokens, n] -> like keys: for each stream,
    sigmoid(root(key . query / sqrt(n))) * value, where root(z) = sign(z) sqrt(max(|z|, 1e-6))."""
    if not _is_native(keys, queries, value) or (kernels := library()) is None:
        return gated_streams_twin(keys, queries, value)
    tokens, streams, n = keys.shape
    result = torch.empty_like(keys)
    kernels.caravan_gate_streams(
        address(keys, keys.shape), address(queries, keys.shape), address(value, (tokens, n)),
        n**-0.5, tokens, streams, n, result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result


def add_to_others_(x: Tensor, y: Tensor) -> Tensor:
    """x [tokens, streams, n], changed: y [tokens, n] is added to all streams but the first."""
    if not _is_native(x, y) or library() is None:
        return add_to_others_twin_(x, y)
    for stream in range(1, x.shape[1]):
        add_(x[:, stream], y)
    return x


def match_rms_(x: Tensor, other: Tensor, *, least: float) -> Tensor:
    """x [tokens, n], changed: each row is scaled to the root mean square of that of `other`, like
    x. `least`: lower bound of its own mean square."""
    if not _is_native(x, other) or (kernels := library()) is None:
        return match_rms_twin_(x, other, least=least)
    tokens, n = x.shape
    kernels.caravan_match_rms(
        row_address(x, x.shape, torch.float32), x.stride(0),
        row_address(other, x.shape, torch.float32), other.stride(0), least, tokens, n,
        torch.get_num_threads(),
    )  # fmt: skip
    return x


def cut_low(x: Tensor, *, bound: float) -> Tensor:
    """x [tokens, n] -> max(x - mean - bound * deviation, 0), mean and standard deviation of each
    row, in x's type."""
    if not _is_native(x) or (kernels := library()) is None:
        return cut_low_twin(x, bound=bound)
    tokens, n = x.shape
    result = torch.empty(tokens, n)
    kernels.caravan_cut_low(
        row_address(x, x.shape, torch.float32), x.stride(0), bound, tokens, n, result.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return result


def mixed_streams_twin(x: Tensor, mixture: Tensor) -> Tensor:
    """The specification of `mixed_streams`."""
    result = x.clone()
    for stream in range(x.shape[1]):
        result.addcmul_(mixture[:, :, stream, None], x[:, stream, None])
    return result


def corrected_streams_twin_(x: Tensor, value: Tensor, shares: Tensor, *, active: int) -> Tensor:
    """The specification of `corrected_streams_`."""
    error = value - x[:, active]
    return x.addcmul_((shares + 1)[:, :, None], error[:, None])


def add_shares_twin_(x: Tensor, value: Tensor, shares: Tensor) -> Tensor:
    """The specification of `add_shares_`."""
    return x.addcmul_(shares[:, :, None], value[:, None])


def gated_streams_twin(keys: Tensor, queries: Tensor, value: Tensor) -> Tensor:
    """The specification of `gated_streams`."""
    z = (keys.float() * queries.float()).sum(dim=2, keepdim=True) * keys.shape[2] ** -0.5
    root = z.abs().clamp_(min=1e-6).sqrt_() * z.sign()
    return (root.sigmoid() * value[:, None].float()).to(keys.dtype)


def add_to_others_twin_(x: Tensor, y: Tensor) -> Tensor:
    """The specification of `add_to_others_`."""
    x[:, 1:] += y[:, None]
    return x


def match_rms_twin_(x: Tensor, other: Tensor, *, least: float) -> Tensor:
    """The specification of `match_rms_`."""
    own = _mean_square(x).clamp_(min=least)
    return x.mul_(_mean_square(other).div_(own).sqrt_())


def cut_low_twin(x: Tensor, *, bound: float) -> Tensor:
    """The specification of `cut_low`."""
    wide = x.float()
    mean, deviation = row_moments(wide)
    return (wide - mean.add_(deviation, alpha=bound)).relu_().to(x.dtype)


def _mean_square(x: Tensor) -> Tensor:
    mean, deviation = row_moments(x)
    return mean.square_().add_(deviation.square_())


def _is_native(*parts: Tensor) -> bool:
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in parts)
