"""Norms, rotary embeddings, activations and softcaps on CUDA devices, one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.activations import Rounded, RoundedActivations
from runtime.kernels.triton.curves import cosine_and_sine, curved, expm1, tanh
from runtime.kernels.triton.launch import divided, launch, next_power, with_adjacent_elements
from runtime.kernels.triton.overlap import begin_next, wait_for_previous
from runtime.kernels.triton.rounded import empty_rounded, planes_of, store_rounded
from runtime.quant.weight import Compute

# Number of elements that a program of `gate_kernel` computes, and of angles for `angles_kernel`.
ELEMENTS, ANGLES = 1024, 128
_SOFTCAP = tl.constexpr(8)  # as in runtime/kernels/pointwise.py


@triton.jit
def norm_kernel(
    x, weight, bias, result, row_stride, part_stride, eps,
    PARTS: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, LAYER: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Grid: vectors. The norm of one vector, with one of WEIGHTS rows of weights, by turns."""
    begin_next()
    wait_for_previous()
    number = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PADDED)
    exists = index < N
    at = number // PARTS * row_stride + number % PARTS * part_stride
    value = tl.load(x + at + index, mask=exists, other=0.0).to(tl.float32)
    if WEIGHTS > 1:
        own = number % WEIGHTS * N
        weight += own
        if LAYER:
            bias += own
    value = _normed(value, weight, bias, index, eps, N, LAYER, WEIGHTS > 0)
    tl.store(result + number * N + index, value.to(result.dtype.element_ty), mask=exists)


@triton.jit
def add_norm_kernel(
    x, y, weight, bias, result, planes, scales, sums, x_stride, y_stride, scale, eps,
    N: tl.constexpr, PADDED: tl.constexpr, LAYER: tl.constexpr, WEIGHTED: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """Grid: rows. x = x * scale + y, if there is a y, rounded after each operation as by torch, and
    its norm, which is also rounded to integers with PLANES."""
    begin_next()
    wait_for_previous()
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    exists, at = index < N, x + row * x_stride + index
    sum = tl.load(at, mask=exists, other=0.0)
    if y is not None:
        scaled = (sum.to(tl.float32) * scale).to(x.dtype.element_ty)
        other = tl.load(y + row * y_stride + index, mask=exists, other=0.0).to(tl.float32)
        sum = (scaled.to(tl.float32) + other).to(x.dtype.element_ty)
        tl.store(at, sum, mask=exists)
    value = _normed(sum.to(tl.float32), weight, bias, index, eps, N, LAYER, WEIGHTED)
    value = value.to(result.dtype.element_ty)
    tl.store(result + row * N + index, value, mask=exists)
    if PLANES > 0:
        group = tl.arange(0, PADDED // 32)
        store_rounded(
            tl.reshape(value.to(tl.float32), [PADDED // 32, 32]), row * (N // 32) + group,
            group < N // 32, planes, scales, sums, tl.num_programs(0) * (N // 32), PLANES,
        )  # fmt: skip


@triton.jit
def _normed(
    value, weight, bias, index, eps, N: tl.constexpr, LAYER: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    """RMS norm or, with LAYER, layer norm, which has weight and bias. value float32 [padded], zeros
    from N on."""
    exists = index < N
    if LAYER:
        value = tl.where(exists, value - tl.sum(value, 0) / N, 0.0)
    value = value * tl.math.rsqrt(tl.sum(value * value, 0) / N + eps)
    if WEIGHTED:
        factor = tl.load(weight + index, mask=exists, other=0.0).to(tl.float32)
        if LAYER:  # one operation, in every kernel: two spill on sm_90
            offset = tl.load(bias + index, mask=exists, other=0.0).to(tl.float32)
            value = tl.fma(value, factor, offset)
        else:
            value *= factor
    return value


@triton.jit
def gate_kernel(
    gate, up, result, n, gate_stride, up_stride, cap,
    CURVE: tl.constexpr, GATED: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Grid: rows x blocks of ELEMENTS. The curve of the gate, times `up` if GATED."""
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    exists = index < n
    x = tl.load(gate + row * gate_stride + index, mask=exists, other=0.0).to(tl.float32)
    value = cap * tanh(x / cap) if CURVE == _SOFTCAP else curved(x, CURVE)
    if GATED:
        value *= tl.load(up + row * up_stride + index, mask=exists, other=0.0).to(tl.float32)
    tl.store(result + row * n + index, value.to(result.dtype.element_ty), mask=exists)


@triton.jit
def xielu_kernel(
    x, result, n, positive, negative, beta, eps, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of ELEMENTS."""
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    exists = index < n
    value = tl.load(x + index, mask=exists, other=0.0).to(tl.float32)
    below = negative * (expm1(tl.minimum(value, eps)) - value)
    value = tl.where(value > 0, positive * value * value, below) + beta * value
    tl.store(result + index, value.to(result.dtype.element_ty), mask=exists)


@triton.jit
def load_pairs(
    heads, exists, HALF: tl.constexpr, PADDED: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """heads: pointers [n, 1], of which some exist [n, 1] -> the first and the second elements of
    HALF pairs, float32 [n, PADDED] each. A pair is (i, i + HALF) with HALVES, else (2i, 2i + 1);
    then one load of adjacent elements reads both."""
    if HALVES:
        pair = tl.arange(0, PADDED)[None, :]
        mask = exists & (pair < HALF)
        first = tl.load(heads + pair, mask=mask, other=0.0)
        second = tl.load(heads + HALF + pair, mask=mask, other=0.0)
    else:
        index = tl.arange(0, 2 * PADDED)[None, :]
        both = tl.load(heads + index, mask=exists & (index < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(both, [heads.shape[0], PADDED, 2]))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(
    heads, exists, first, second, HALF: tl.constexpr, PADDED: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """As `load_pairs`; first and second in the type of the heads."""
    if HALVES:
        pair = tl.arange(0, PADDED)[None, :]
        mask = exists & (pair < HALF)
        tl.store(heads + pair, first, mask=mask)
        tl.store(heads + HALF + pair, second, mask=mask)
    else:
        index = tl.arange(0, 2 * PADDED)[None, :]
        both = tl.reshape(tl.join(first, second), [heads.shape[0], 2 * PADDED])
        tl.store(heads + index, both, mask=exists & (index < 2 * HALF))


@triton.jit(do_not_specialize=["tokens"])
def angles_kernel(
    positions, frequencies, axes, cos, sin, tokens, magnitude,
    PAIRS: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of ANGLES. Positions are those of one axis or, with `axes`, of several."""
    place = tl.program_id(0) * ANGLES + tl.arange(0, ANGLES)
    exists, at = place < tokens * PAIRS, place // PAIRS
    if axes is not None:
        at += tokens * tl.load(axes + place % PAIRS, exists, 0).to(tl.int32)
    position = tl.load(positions + at, exists, 0).to(tl.float32)
    cosine, sine = cosine_and_sine(position * tl.load(frequencies + place % PAIRS, exists, 0.0))
    tl.store(cos + place, cosine * magnitude, exists)
    tl.store(sin + place, sine * magnitude, exists)


@triton.jit
def rope_kernel(
    x, cos, sin, result, row_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
    HEADS_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. Rotates all heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS_PADDED), tl.arange(0, HALF_PADDED)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    source = x + token * row_stride + head[:, None] * head_stride
    target = result + (token * HEADS + head[:, None]) * DIM
    exists = (head < HEADS)[:, None]
    a, b = load_pairs(source, exists, HALF, HALF_PADDED, HALVES)
    first, second = a * c - b * s, a * s + b * c
    type = result.dtype.element_ty
    store_pairs(
        target, exists, first.to(type), second.to(type), HALF, HALF_PADDED, HALVES
    )  # fmt: skip
    if 2 * HALF < DIM:
        rest = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
        exists = exists & (rest < DIM)
        tl.store(target + rest, tl.load(source + rest, mask=exists), mask=exists)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`rms_norm`, or `layer_norm` if there is a bias."""
    n = x.shape[-1]
    rows = x if _has_regular_rows(x) else x.contiguous()
    strides = (rows.stride(0), rows.stride(1)) if rows.dim() == 3 else (n, n)
    if rows.dim() == 2:
        strides = rows.stride(0), 0
    result = x.new_empty(x.shape)
    padded = next_power(n)
    launch(
        norm_kernel, (x.numel() // n,), rows, weight, bias, result, *strides, eps,
        PARTS=x.shape[1] if x.dim() == 3 else 1, N=n, PADDED=padded, LAYER=bias is not None,
        WEIGHTS=0 if weight is None else weight.numel() // n, num_warps=_norm_warps(padded),
        enable_fp_fusion=False, device=x.device, overlaps=True,
    )  # fmt: skip
    return result


def add_norm_(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """x [rows, n] = x * scale + y in place, adjacent elements in rows of both; its `norm` in
    `dtype`."""
    result = x.new_empty(x.shape, dtype=dtype)
    _launch_add_norm(x, y, weight, bias, eps, scale, result, None)
    return result


def rounded_norm_(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    scale: float,
    rounding: Compute,
) -> RoundedActivations:
    """`add_norm_`, or the `norm` of x without a y, and the integers to which products of `rounding`
    round it; n is a multiple of 32."""
    rows, n = x.shape
    integers = empty_rounded(rows, n, planes_of(rounding), x.device)
    result = RoundedActivations(x.new_empty(x.shape), integers)
    _launch_add_norm(x, y, weight, bias, eps, scale, result.x, result.rounded)
    return result


def _launch_add_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: float,
    result: Tensor,
    rounded: Rounded | None,
) -> None:
    rows, n = x.shape
    padded = next_power(n)
    integers = (None,) * 3 if rounded is None else (rounded.planes, rounded.scales, rounded.sums)
    launch(
        add_norm_kernel, (rows,), x, y, weight, bias, result, *integers, x.stride(0),
        0 if y is None else y.stride(0), scale, eps, N=n, PADDED=padded, LAYER=bias is not None,
        WEIGHTED=weight is not None, PLANES=0 if rounded is None else len(rounded.planes),
        num_warps=_norm_warps(padded), enable_fp_fusion=False, device=x.device, overlaps=True,
    )  # fmt: skip


def gate(curve: int, gate: Tensor, up: Tensor | None, *, cap: float = 1.0) -> Tensor:
    """The curve of gate [..., n], times `up` if given."""
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"a gate {list(gate.shape)} for values {list(up.shape)}")
    rows, others = _matrix(gate), None if up is None else _matrix(up)
    result = gate.new_empty(gate.shape)
    launch(
        gate_kernel, (rows.shape[0], divided(rows.shape[1], ELEMENTS)), rows, others, result,
        rows.shape[1], rows.stride(0), 0 if others is None else others.stride(0), cap,
        CURVE=curve, GATED=up is not None, ELEMENTS=ELEMENTS, device=gate.device,
    )  # fmt: skip
    return result


def xielu(x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    """As `runtime.kernels.xielu.xielu`."""
    x = x.contiguous()
    result = x.new_empty(x.shape)
    launch(
        xielu_kernel, (divided(x.numel(), ELEMENTS),), x, result, x.numel(), positive, negative,
        beta, eps, ELEMENTS=ELEMENTS, device=x.device,
    )  # fmt: skip
    return result


def rotary_angles(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None, magnitude: float
) -> tuple[Tensor, Tensor]:
    """As `runtime.kernels.pointwise.rotary_angles`."""
    tokens, pairs = positions.shape[-1], len(frequencies)
    cos, sin = (frequencies.new_empty(tokens, pairs) for _ in range(2))
    launch(
        angles_kernel, (divided(tokens * pairs, ANGLES),), positions.contiguous(), frequencies,
        axes, cos, sin, tokens, magnitude, PAIRS=pairs, ANGLES=ANGLES, num_warps=4,
        device=positions.device,
    )  # fmt: skip
    return cos, sin


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool) -> Tensor:
    """x [tokens, heads, dim], cos and sin float32 [tokens, rotated / 2] -> like x."""
    (tokens, heads, dim), half = x.shape, cos.shape[-1]
    if 2 * half > dim:
        raise ValueError(f"{half} angles rotate {2 * half} dimensions; heads have {dim}")
    x = with_adjacent_elements(x)
    result = x.new_empty(x.shape)
    launch(
        rope_kernel, (tokens,), x, cos.float().contiguous(), sin.float().contiguous(), result,
        *x.stride()[:2], HEADS=heads, DIM=dim, HALF=half, HALVES=halves,
        HEADS_PADDED=next_power(heads), HALF_PADDED=next_power(half),
        REST_PADDED=next_power(max(1, dim - 2 * half)), device=x.device,
    )  # fmt: skip
    return result


def _has_regular_rows(x: Tensor) -> bool:
    """Whether at most two strides describe the places of the rows."""
    return x.is_contiguous() or (x.dim() in (2, 3) and x.stride(-1) == 1)


def _norm_warps(padded: int) -> int:
    return min(32, max(1, padded // 512))


def _matrix(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n] with adjacent elements in a row; copied if necessary."""
    x = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()
    return x.view(-1, x.shape[-1])
