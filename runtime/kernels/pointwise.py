"""Norms, rotary embeddings, activations, sums and softcaps; rows are computed independently."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.activations import MOST_ROUNDED_ROWS, Activations
from runtime.kernels.native import address, library, row_address
from runtime.kernels.triton.launch import has_kernels
from runtime.quant.weight import Compute

# Curves of caravan_gate in cpu/pointwise.c and, except for _SOFTCAP, `curved` in triton/curves.py.
_SILU, _GELU, _GELU_ERF, _GELU_QUICK, _SIGMOID, *_OTHERS = range(10)
_RELU_SQUARED, _STRAIGHT, _RELU, _SOFTCAP, _SOFTPLUS = _OTHERS

# gate, values [..., n] -> [..., n], such as `silu_mul`.
Gate = Callable[[Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., hidden], weight [hidden] -> x / sqrt(mean(x^2) + eps) * weight, in x's type.

    For x [..., n, hidden], weight may be [n, hidden]. Without a weight the factor is 1. Computed in
    float32. Zhang and Sennrich, "Root Mean Square Layer Normalization".
    """
    _check_parts(x, weight)
    if x.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(x.device):
            return _triton().norm(x, weight, None, eps)
        return rms_norm_twin(x, weight, eps)
    rows, n = _row_parts(x.float()), x.shape[-1]
    factor = None if weight is None else weight.float().contiguous().view(-1, weight.shape[-1])
    weights = 1 if factor is None else len(factor)
    result = torch.empty(x.shape)
    kernels.caravan_rms_norm(
        rows.tensor.data_ptr(), rows.stride,
        None if factor is None else address(factor, (weights, n)), weights, eps, rows.count,
        rows.parts, n, result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., hidden] -> (x - mean) / sqrt(variance + eps) * weight + bias, in x's type.

    For x [..., n, hidden], weight and bias may be [n, hidden]. Computed in float32. Ba, Kiros and
    Hinton, "Layer Normalization"."""
    _check_parts(x, weight)
    if x.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(x.device):
            return _triton().norm(x, weight, bias, eps)
        return layer_norm_twin(x, weight, bias, eps)
    rows, n = _row_parts(x.float()), x.shape[-1]
    factor, offset = (each.float().contiguous() for each in (weight, bias))
    shape = (factor.numel() // factor.shape[-1], n)
    result = torch.empty(x.shape)
    kernels.caravan_layer_norm(
        rows.tensor.data_ptr(), rows.stride, address(factor.view(-1, factor.shape[-1]), shape),
        address(offset.view(-1, offset.shape[-1]), shape), shape[0], eps, rows.count, rows.parts, n,
        result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result.to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of each head by the angle of frequency i.

    x [tokens, heads, dim], cos and sin [tokens, rotated / 2] -> like x. Dimensions from `rotated`
    on are copied. Su et al., "RoFormer", in the order of the original weights."""
    return _rope(x, cos, sin, halves=False)


def rope_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rope_interleaved`, for the pairs (i, i + rotated / 2), the order of GPT-NeoX."""
    return _rope(x, cos, sin, halves=True)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., n] -> silu(gate) * up, in gate's type; computed in float32."""
    return _gate(_SILU, gate, up)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, likewise; the approximation of GELU with tanh."""
    return _gate(_GELU, gate, up)


def gelu_erf_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu_erf(gate) * up, likewise."""
    return _gate(_GELU_ERF, gate, up)


def gelu_quick_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu_quick(gate) * up, likewise."""
    return _gate(_GELU_QUICK, gate, up)


def relu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """max(gate, 0) * up, likewise."""
    return _gate(_RELU, gate, up)


def relu_squared_mul(gate: Tensor, up: Tensor) -> Tensor:
    """max(gate, 0)^2 * up, likewise."""
    return _gate(_RELU_SQUARED, gate, up)


def sigmoid_mul(gate: Tensor, up: Tensor) -> Tensor:
    """sigmoid(gate) * up, likewise."""
    return _gate(_SIGMOID, gate, up)


def softplus_mul(gate: Tensor, up: Tensor) -> Tensor:
    """log(1 + e^gate) * up, as above."""
    return _gate(_SOFTPLUS, gate, up)


def mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * up, likewise."""
    return _gate(_STRAIGHT, gate, up)


def curve_of(gate: Gate) -> int | None:
    """The number of its curve; None if it is not one of the functions above."""
    return _CURVES.get(gate)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), in x's type; computed in float32."""
    return _gate(_SILU, x, None)


def gelu(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), likewise; Hendrycks and Gimpel."""
    return _gate(_GELU, x, None)


def gelu_erf(x: Tensor) -> Tensor:
    """0.5 x (1 + erf(x / sqrt(2))), likewise: what the tanh approximates."""
    return _gate(_GELU_ERF, x, None)


def gelu_quick(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), likewise: the coarser approximation that CLIP uses."""
    return _gate(_GELU_QUICK, x, None)


def curve_alone(gate: Gate, x: Tensor) -> Tensor:
    """The curve of a function above, without `up`, such as sigmoid(x) for `sigmoid_mul`."""
    return _gate(_CURVES[gate], x, None)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2, likewise; So et al., "Primer"."""
    return _gate(_RELU_SQUARED, x, None)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in x's type; computed in float32. Gemma 2's report, section 2."""
    if x.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(x.device):
            return _triton().gate(_SOFTCAP, x, None, cap=cap)
        return softcap_twin(x, cap)
    wide = x.float().contiguous()
    result = torch.empty_like(wide)
    kernels.caravan_softcap(
        address(wide, x.shape), wide.numel(), cap, result.data_ptr(), torch.get_num_threads()
    )
    return result.to(x.dtype)


def rotary_angles(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None, magnitude: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, times `magnitude`, of position * frequency; float32 [tokens, pairs] each.

    positions int64 [tokens], frequencies float32 [pairs]. With axes int64 [pairs], positions are
    [axes, tokens], and a pair uses those of its axis.
    """
    if (positions.dim() == 2) != (axes is not None):
        raise ValueError("positions on several axes need the axis of each frequency")
    if positions.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(positions.device):
            return _triton().rotary_angles(positions, frequencies, axes, magnitude)
        return rotary_angles_twin(positions, frequencies, axes, magnitude)
    tokens, pairs = positions.shape[-1], len(frequencies)
    cos, sin = torch.empty(tokens, pairs), torch.empty(tokens, pairs)
    kernels.caravan_angles(
        address(positions, positions.shape, torch.int64),
        None if axes is None else address(axes, (pairs,), torch.int64),
        address(frequencies, (pairs,)), tokens, pairs, magnitude, cos.data_ptr(), sin.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return cos, sin


def add_(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """x = x * scale + y in place. x [..., n]; y like x, or [n] for all rows."""
    fits = x.dtype == y.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1
    if x.device.type != "cpu" or not fits or (kernels := library()) is None:
        return add_twin_(x, y, scale=scale)
    rows, n = x.shape
    shape = (n,) if y.dim() == 1 else (rows, n)
    kernels.caravan_add(
        x.data_ptr(), x.stride(0), row_address(y, shape, torch.float32),
        0 if y.dim() == 1 else y.stride(0), scale, rows, n, torch.get_num_threads(),
    )  # fmt: skip
    return x


def add_norm_(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`add_` of x and y, like x [rows, n], then the `rms_norm` of x, or its `layer_norm` if there
    is a bias, in `dtype`, by default x's: one launch on CUDA devices."""
    dtype = dtype or x.dtype
    if has_kernels(x.device) and x.dim() == 2 and x.stride(1) == y.stride(1) == 1:
        return _triton().add_norm_(x, y, weight, bias, eps, scale=scale, dtype=dtype)
    return _norm(add_(x, y, scale=scale).to(dtype), weight, bias, eps)


def rounded_norm_(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    scale: float = 1.0,
    rounding: Compute,
) -> Activations:
    """`add_norm_`, or the norm of x [rows, n] without a y, for products whose weights have this
    `rounding`. CUDA devices round a few rows in the same launch."""
    adjacent = all(rows is None or rows.stride(1) == 1 for rows in (x, y))
    if has_kernels(x.device) and adjacent and len(x) <= MOST_ROUNDED_ROWS:
        return _triton().rounded_norm_(x, y, weight, bias, eps, scale=scale, rounding=rounding)
    if y is None:
        return _norm(x, weight, bias, eps)
    return add_norm_(x, y, weight, bias, eps, scale=scale)


def scale_(x: Tensor, scale: float | Tensor) -> Tensor:
    """x [tokens, n] * scale in place; on devices, scale may be a tensor, float32 []."""
    fits = x.is_contiguous() and x.dtype == torch.float32 and isinstance(scale, float)
    if x.device.type != "cpu" or not fits or (kernels := library()) is None:
        return x.mul_(scale)
    kernels.caravan_add(
        x.data_ptr(), x.shape[-1], None, 0, scale, x.numel() // x.shape[-1], x.shape[-1],
        torch.get_num_threads(),
    )  # fmt: skip
    return x


def temper(x: Tensor, positions: Tensor, *, beta: float, span: float, offset: int) -> Tensor:
    """x [tokens, heads, n] * (1 + beta * ln(1 + floor((position + offset) / span))), in x's type.

    positions [tokens] int64. Nakanishi, "Scalable-Softmax", as in Llama 4.
    """
    if x.device.type != "cpu" or (kernels := library()) is None:
        return temper_twin(x, positions, beta=beta, span=span, offset=offset)
    rows, (tokens, heads, n) = _row_parts(x.float()), x.shape
    result = torch.empty(x.shape)
    kernels.caravan_temper(
        rows.tensor.data_ptr(), rows.stride if rows.count == tokens else heads * n,
        address(positions, (tokens,), torch.int64), offset, span, beta, tokens, heads * n,
        result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result.to(x.dtype)


def joined(*parts: Tensor) -> Tensor:
    """[tokens, heads, n] each -> [tokens, heads, sum of n], contiguous; always a copy."""
    fits = all(x.dtype == torch.float32 and x.stride(2) == 1 for x in parts)
    if parts[0].device.type != "cpu" or not fits or (kernels := library()) is None:
        return torch.cat(parts, dim=2)
    tokens, heads, width = *parts[0].shape[:2], sum(x.shape[2] for x in parts)
    result, begin = torch.empty(tokens, heads, width), 0
    for x in parts:
        kernels.caravan_copy(
            row_address(x, (tokens, heads, x.shape[2]), torch.float32), x.stride(0), x.stride(1),
            result[..., begin:].data_ptr(), heads * width, width, tokens, heads, x.shape[2],
        )  # fmt: skip
        begin += x.shape[2]
    return result


def contiguous(x: Tensor) -> Tensor:
    """x [tokens, n] or [tokens, heads, n]: x itself if it is contiguous, else a copy."""
    if x.is_contiguous():
        return x
    return joined(x) if x.dim() == 3 else joined(x.unsqueeze(1)).squeeze(1)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [tokens, n], rows [count] int64 -> [count, n]."""
    fits = x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1
    if x.device.type != "cpu" or not fits or (kernels := library()) is None:
        return x.index_select(0, rows)
    (tokens, n), count = x.shape, len(rows)
    result = torch.empty(count, n)
    if kernels.caravan_take_rows(
        x.data_ptr(), x.stride(0), tokens, address(rows, (count,), torch.int64), count, n,
        result.data_ptr(),
    ):  # fmt: skip
        raise IndexError(f"rows beyond the {tokens} of a step")
    return result


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool) -> Tensor:
    if x.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(x.device):
            return _triton().rope(x, cos, sin, halves=halves)
        return (rope_halves_twin if halves else rope_interleaved_twin)(x, cos, sin)
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    (tokens, heads, dim), half = x.shape, cos.shape[-1]
    if 2 * half > dim:
        raise ValueError(f"{half} angles rotate {2 * half} dimensions; heads have {dim}")
    rows, result = _row_parts(x.float()), torch.empty(x.shape)
    stride = rows.stride if rows.count == tokens else heads * dim
    kernels.caravan_rope(
        rows.tensor.data_ptr(), stride, address(cos, (tokens, half)), address(sin, (tokens, half)),
        tokens, heads, dim, half, halves, result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result.to(x.dtype)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None:
        return rms_norm(x, weight, eps)
    assert weight is not None
    return layer_norm(x, weight, bias, eps)


def _gate(curve: int, gate: Tensor, up: Tensor | None) -> Tensor:
    if gate.device.type != "cpu" or (kernels := library()) is None:
        if has_kernels(gate.device):
            return _triton().gate(curve, gate, up)
        return _gate_twin(curve, gate, up)
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"a gate {list(gate.shape)} for values {list(up.shape)}")
    wide = _matrix(gate.float())
    other = None if up is None else _matrix(up.float())
    result = torch.empty(gate.shape)
    kernels.caravan_gate(
        curve, wide.data_ptr(), wide.stride(0), None if other is None else other.data_ptr(),
        0 if other is None else other.stride(0), *wide.shape, result.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return result.to(gate.dtype)


def _triton() -> ModuleType:
    from runtime.kernels.triton import pointwise

    return pointwise


def _check_parts(x: Tensor, weight: Tensor | None) -> None:
    if weight is not None and weight.dim() == 2 and weight.shape != x.shape[-2:]:
        raise ValueError(f"weights {list(weight.shape)} of a norm for {list(x.shape)}")


@dataclass(frozen=True, slots=True)
class _RowParts:
    """`count` rows, `stride` elements apart, of `parts` adjacent parts each."""

    tensor: Tensor
    count: int
    stride: int
    parts: int


def _row_parts(x: Tensor) -> _RowParts:
    """x float32 [..., n], copied only if neither it nor its rows are contiguous."""
    n = x.shape[-1]
    if not x.is_contiguous() and x.dim() in (2, 3) and x[:1].is_contiguous():
        return _RowParts(x, x.shape[0], x.stride(0), 1 if x.dim() == 2 else x.shape[1])
    x = contiguous(x) if x.dim() in (2, 3) else x.contiguous()
    return _RowParts(x, x.numel() // n, n, 1)


def _matrix(x: Tensor) -> Tensor:
    """x float32 [..., n] -> [rows, n] with adjacent elements in a row; copied if necessary."""
    x = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()
    return x.view(-1, x.shape[-1])


def rms_norm_twin(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The specification of `rms_norm`."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normal if weight is None else normal * weight.float()).to(x.dtype)


def layer_norm_twin(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The specification of `layer_norm`."""
    if weight.dim() == 1:
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)
    normal = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return (normal * weight.float() + bias.float()).to(x.dtype)


def rope_interleaved_twin(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification of `rope_interleaved`."""
    rotated = 2 * cos.shape[-1]
    even, odd = x[..., 0:rotated:2].float(), x[..., 1:rotated:2].float()
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return torch.cat([pairs.flatten(-2).to(x.dtype), x[..., rotated:]], dim=-1)


def rope_halves_twin(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification of `rope_halves`."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return torch.cat([*(part.to(x.dtype) for part in turned), x[..., 2 * half :]], dim=-1)


def rotary_angles_twin(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None, magnitude: float
) -> tuple[Tensor, Tensor]:
    """The specification of `rotary_angles`."""
    if axes is None:
        angles = positions.unsqueeze(1) * frequencies
    else:
        angles = positions.index_select(0, axes).t() * frequencies
    return angles.cos().mul_(magnitude), angles.sin().mul_(magnitude)


def add_twin_(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """The specification of `add_`."""
    return (x if scale == 1.0 else x.mul_(scale)).add_(y)


def temper_twin(x: Tensor, positions: Tensor, *, beta: float, span: float, offset: int) -> Tensor:
    """The specification of `temper`."""
    spans = ((positions + offset).float() / span).floor()
    return (x.float() * (1 + beta * spans.log1p())[:, None, None]).to(x.dtype)


def softcap_twin(x: Tensor, cap: float) -> Tensor:
    """The specification of `softcap`."""
    return (x.float() / cap).tanh_().mul_(cap).to(x.dtype)


_CURVED: Mapping[int, Callable[[Tensor], Tensor]] = {
    _SILU: F.silu,
    _GELU: partial(F.gelu, approximate="tanh"),
    _GELU_ERF: F.gelu,
    _GELU_QUICK: lambda x: x * torch.sigmoid(1.702 * x),
    _SIGMOID: torch.sigmoid,
    _RELU_SQUARED: lambda x: x.relu().square(),
    _STRAIGHT: lambda x: x,
    _RELU: torch.relu,
    _SOFTPLUS: F.softplus,
}


def _gate_twin(curve: int, gate: Tensor, up: Tensor | None = None) -> Tensor:
    curved = _CURVED[curve](gate.float())
    return (curved if up is None else curved * up.float()).to(gate.dtype)


# The specifications of the gates, and with one argument of the activations.
silu_mul_twin = partial(_gate_twin, _SILU)
gelu_mul_twin = partial(_gate_twin, _GELU)
gelu_erf_mul_twin = partial(_gate_twin, _GELU_ERF)
gelu_quick_mul_twin = partial(_gate_twin, _GELU_QUICK)
relu_mul_twin = partial(_gate_twin, _RELU)
sigmoid_mul_twin = partial(_gate_twin, _SIGMOID)
softplus_mul_twin = partial(_gate_twin, _SOFTPLUS)
relu_squared_mul_twin = partial(_gate_twin, _RELU_SQUARED)
mul_twin = partial(_gate_twin, _STRAIGHT)

# 1 / (1 + e^-x), in x's type; computed in float32.
sigmoid = partial(curve_alone, sigmoid_mul)
_CURVES: Mapping[Gate, int] = {
    silu_mul: _SILU,
    gelu_mul: _GELU,
    gelu_erf_mul: _GELU_ERF,
    gelu_quick_mul: _GELU_QUICK,
    relu_mul: _RELU,
    relu_squared_mul: _RELU_SQUARED,
    sigmoid_mul: _SIGMOID,
    softplus_mul: _SOFTPLUS,
}
