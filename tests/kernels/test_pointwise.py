"""Norms, rotary embeddings and gates: twins against plain torch, fast paths against the twins."""

import math

import pytest
import torch
import torch.nn.functional as F

from runtime.kernels import pointwise
from runtime.kernels.clip import clip_, clip_twin_
from runtime.kernels.pointwise import (
    add_,
    add_norm_,
    add_twin_,
    contiguous,
    joined,
    layer_norm,
    layer_norm_twin,
    mul,
    mul_twin,
    relu_squared,
    relu_squared_mul_twin,
    rms_norm,
    rms_norm_twin,
    rope_halves,
    rope_halves_twin,
    rope_interleaved,
    rope_interleaved_twin,
    rotary_angles,
    rotary_angles_twin,
    scale_,
    silu_mul,
    softcap,
    softcap_twin,
    take_rows,
    temper,
    temper_twin,
)
from runtime.kernels.xielu import xielu, xielu_twin
from tests.kernels.native_kernels import require_native_kernels

# Name of the gate -> what it does to one side.
CURVES = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}
every_curve = pytest.mark.parametrize("curve", CURVES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (70, 2048), (2, 3, 80), (0, 16)])
@DTYPES
def test_rms_norm_agrees_with_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1])
    expected = F.rms_norm(x.float(), shape[-1:], weight, 1e-5).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    for norm in (rms_norm, rms_norm_twin):
        torch.testing.assert_close(norm(x, weight, 1e-5), expected, **tolerance)


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (2, 3, 80)])
def test_rms_norm_without_weights_has_ones(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 3
    for norm in (rms_norm, rms_norm_twin):
        got = norm(x, None, 1e-5)
        torch.testing.assert_close(got, F.rms_norm(x, shape[-1:], None, 1e-5), rtol=1e-5, atol=1e-6)


def test_parts_of_rows_may_have_weights_of_their_own() -> None:
    rows, weight = torch.randn(5, 70), torch.randn(3, 20)
    parts = rows[:, :60].unflatten(1, (3, 20))
    expected = F.rms_norm(parts, (20,), None, 1e-5) * weight
    for norm in (rms_norm, rms_norm_twin):
        for x in (parts, parts.contiguous()):
            torch.testing.assert_close(norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)
    bias = torch.randn(3, 20)
    expected = F.layer_norm(parts, (20,), eps=1e-5) * weight + bias
    for norm in (layer_norm, layer_norm_twin):
        for x in (parts, parts.contiguous()):
            torch.testing.assert_close(norm(x, weight, bias, 1e-5), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (70, 2048), (2, 3, 83), (0, 16)])
@DTYPES
def test_layer_norm_agrees_with_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The values are far from 0, where a variance computed from squares is inaccurate."""
    x = (torch.randn(shape) + 100).to(dtype)
    weight, bias = torch.randn(shape[-1]), torch.randn(shape[-1])
    expected = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-5).to(dtype)
    rtol = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    for norm in (layer_norm, layer_norm_twin):
        got = norm(x, weight, bias, 1e-5)
        torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-4)


def test_a_norm_has_the_same_bits_alone_and_in_any_batch() -> None:
    require_native_kernels()
    x, weight, bias = torch.randn(70, 1100), torch.randn(1100), torch.randn(1100)
    for norm in (
        lambda rows: rms_norm(rows, weight, 1e-6),
        lambda rows: layer_norm(rows, weight, bias, 1e-6),
    ):
        alone = torch.cat([norm(row) for row in x.split(1)])
        for rows in range(1, 71):
            assert torch.equal(norm(x[-rows:]), alone[-rows:])


@pytest.mark.parametrize(("heads", "dim", "rotated"), [(1, 8, 8), (32, 64, 64), (3, 80, 20)])
@pytest.mark.parametrize("tokens", [0, 1, 33])
@DTYPES
def test_interleaved_rope_is_multiplication_of_complex_numbers(
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


@pytest.mark.parametrize(("heads", "dim", "rotated"), [(1, 8, 8), (32, 64, 64), (3, 80, 20)])
@pytest.mark.parametrize("tokens", [0, 1, 33])
@DTYPES
def test_rope_of_halves_agrees_with_rotate_half(
    heads: int, dim: int, rotated: int, tokens: int, dtype: torch.dtype
) -> None:
    x = torch.randn(tokens, heads, dim).to(dtype)
    angles = torch.rand(tokens, rotated // 2) * 6
    turned, cos, sin = x[..., :rotated].float(), angles.cos(), angles.sin()
    first, second = turned.chunk(2, dim=-1)
    wide = [torch.cat([part, part], dim=-1)[:, None] for part in (cos, sin)]
    turned = turned * wide[0] + torch.cat([-second, first], dim=-1) * wide[1]
    expected = torch.cat([turned.to(dtype), x[..., rotated:]], dim=-1)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for rope in (rope_halves, rope_halves_twin):
        got = rope(x, cos, sin)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, **tolerance)
        assert torch.equal(got[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (40, 1000), (0, 16)])
@every_curve
@DTYPES
def test_gates_agree_with_torch(shape: tuple[int, ...], curve: str, dtype: torch.dtype) -> None:
    gate, up = (torch.randn(shape) * 10).to(dtype), torch.randn(shape).to(dtype)
    bent = CURVES[curve](gate.double())
    # torch's own erf in float32 loses digits below nought, where its sum with one is small.
    atol = 5e-6 if curve == "gelu_erf" else 1e-6
    tolerance = {"rtol": 1e-5, "atol": atol} if dtype == torch.float32 else {}
    for gated in (getattr(pointwise, f"{curve}_mul"), getattr(pointwise, f"{curve}_mul_twin")):
        torch.testing.assert_close(gated(gate, up), (bent * up.double()).to(dtype), **tolerance)
    activation = getattr(pointwise, curve, None)  # some gates have no function of their name
    alone = pointwise.curve_alone(getattr(pointwise, f"{curve}_mul"), gate)
    for got in (
        alone,
        getattr(pointwise, f"{curve}_mul_twin")(gate),
        *((activation(gate),) if activation else ()),
    ):
        torch.testing.assert_close(got, bent.to(dtype), **tolerance)


@every_curve
def test_gates_are_right_at_their_limits(curve: str) -> None:
    gate = torch.tensor([[-1e30, -1000.0, -88.0, -20.0, -1e-20, 0.0, 1e-20, 20.0, 88.0, 1e30]])
    gate = torch.cat([gate, gate], dim=1)  # within a vector and in the rest
    gated = getattr(pointwise, f"{curve}_mul")
    got = gated(gate, torch.ones_like(gate))
    torch.testing.assert_close(got, CURVES[curve](gate), rtol=1e-5, atol=1e-6)
    assert gated(torch.full((1, 17), torch.nan), torch.ones(1, 17)).isnan().all()


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (40, 1000), (0, 16)])
@DTYPES
def test_products_are_those_of_torch_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    one, other = (torch.randn(shape).to(dtype) for _ in range(2))
    for product in (mul, mul_twin):
        assert torch.equal(product(one, other), (one.float() * other.float()).to(dtype))


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (40, 1000), (0, 16)])
@pytest.mark.parametrize("cap", [0.5, 30.0])
@DTYPES
def test_softcap_agrees_with_torch(shape: tuple[int, ...], cap: float, dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * torch.logspace(-6, 3, shape[-1])).to(dtype)
    expected = (cap * (x.double() / cap).tanh()).to(dtype)
    tolerance = {"rtol": 1e-6, "atol": 0.0} if dtype == torch.float32 else {}
    for capped in (softcap, softcap_twin):
        torch.testing.assert_close(capped(x, cap), expected, **tolerance)
    assert softcap(torch.tensor([torch.nan, 1e30, -1e30]), cap).tolist()[1:] == [cap, -cap]
    assert softcap(torch.full((1, 17), torch.nan), cap).isnan().all()


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (40, 1000), (0, 16)])
@DTYPES
def test_relu_squared_agrees_with_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 10).to(dtype)
    for curve in (relu_squared, relu_squared_mul_twin):
        torch.testing.assert_close(curve(x), F.relu(x.double()).square().to(dtype))
    far = torch.tensor([1e30, -1e30, -0.0, torch.nan] * 5)
    expected = torch.tensor([torch.inf, 0.0, 0.0, torch.nan] * 5)
    torch.testing.assert_close(relu_squared(far), expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (40, 1000), (0, 16)])
@DTYPES
def test_xielu_agrees_with_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * torch.logspace(-8, 2, shape[-1])).to(dtype)
    wide, numbers = x.double(), {"positive": 0.8, "negative": 1.1, "beta": 0.5, "eps": -1e-6}
    below = 1.1 * (torch.expm1(wide.clamp(max=-1e-6)) - wide)
    expected = (torch.where(wide > 0, 0.8 * wide * wide, below) + 0.5 * wide).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 5e-7} if dtype == torch.float32 else {}
    exactly = {"rtol": 2e-6, "atol": 0.0} if dtype == torch.float32 else {}
    for curve in (xielu, xielu_twin):
        got, small = curve(x, **numbers), wide.abs() < 0.1
        torch.testing.assert_close(got, expected, **tolerance)
        torch.testing.assert_close(got[small], expected[small], **exactly)
    far = torch.tensor([1e30, -1e30, 0.0, torch.nan])
    expected = torch.tensor([torch.inf, 0.6e30, -1.1e-6, torch.nan])
    got, expected = xielu(torch.cat([far] * 5), **numbers), torch.cat([expected] * 5)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0, equal_nan=True)


def test_strided_rows_have_the_same_bits_as_contiguous_ones() -> None:
    """Those of parts of a product, also if they are heads of rows."""
    first, second = torch.randn(5, 96).split((48, 48), dim=1)
    angles, weight = torch.rand(5, 4), torch.randn(48)
    per_head = torch.randn(8)
    for apart in (
        lambda a, b: silu_mul(a, b),
        lambda a, b: mul(b, a),
        lambda a, b: silu_mul(b, a.clone()),
        lambda a, b: rms_norm(b, weight, 1e-5),
        lambda a, b: rms_norm(b.unflatten(1, (6, 8)), per_head, 1e-5),
        lambda a, b: layer_norm(b.unflatten(1, (6, 8)), per_head, per_head, 1e-5),
        lambda a, b: rope_halves(b.unflatten(1, (6, 8)), angles.cos(), angles.sin()),
        lambda a, b: rope_interleaved(b.unflatten(1, (6, 8)), angles.cos(), angles.sin()),
        lambda a, b: add_(a.clone(), b),
        lambda a, b: take_rows(b, torch.tensor([4, 0])),
        lambda a, b: temper(b.unflatten(1, (6, 8)), torch.arange(5), beta=0.3, span=2, offset=1),
    ):
        whole = apart(first.contiguous(), second.contiguous())
        assert torch.equal(apart(first, second), whole)


def test_elements_are_clipped_in_place_and_nan_remains() -> None:
    whole = torch.tensor([[3.0, -3.0, 0.5, -0.5, torch.nan, torch.inf, 8.0] * 10] * 3)
    expected, part = clip_twin_(whole[:, :60].clone(), 0.7), whole[:, :60]
    for x in (part.clone(), part):  # the second has rows of more elements
        assert clip_(x, 0.7) is x
        torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
    assert (whole[:, 62:][whole[:, 62:] > 1]).any()


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("shape", [(3, 70), (70,)])
def test_sums_are_those_of_torch_to_the_bit(scale: float, shape: tuple[int, ...]) -> None:
    x, y = torch.randn(3, 70), torch.randn(shape)
    expected = x.clone().mul_(scale).add_(y)
    assert torch.equal(add_twin_(x.clone(), y, scale=scale), expected)
    assert add_(x, y, scale=scale) is x
    assert torch.equal(x, expected)
    assert torch.equal(scale_(x, scale), expected.mul_(scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_of_a_sum_has_the_bits_of_both_steps(dtype: torch.dtype) -> None:
    x, y = torch.randn(3, 70).to(dtype), torch.randn(3, 70).to(dtype)
    weight, bias, added = torch.randn(70), torch.randn(70), add_(x.clone(), y, scale=0.22)
    for factors, expected in (
        ((weight, None), rms_norm(added, weight, 1e-5)),
        ((None, None), rms_norm(added, None, 1e-5)),
        ((weight, bias), layer_norm(added, weight, bias, 1e-5)),
    ):
        total = x.clone()
        assert torch.equal(add_norm_(total, y, *factors, 1e-5, scale=0.22), expected)
        assert torch.equal(total, added)


@DTYPES
def test_queries_are_tempered_by_their_position(dtype: torch.dtype) -> None:
    x, positions = torch.randn(4, 3, 17).to(dtype), torch.tensor([0, 7, 8, 1_000_000])
    got = temper(x, positions, beta=0.1, span=4, offset=1)
    factors = torch.tensor([1 + 0.1 * math.log(1 + (p + 1) // 4) for p in positions.tolist()])
    expected = (x.double() * factors.double()[:, None, None]).to(dtype)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(temper_twin(x, positions, beta=0.1, span=4, offset=1), expected)


@DTYPES
def test_copies_of_parts_are_those_of_torch(dtype: torch.dtype) -> None:
    whole = torch.randn(5, 6, 40).to(dtype)
    parts = whole.split((16, 3, 21), dim=2)
    first, middle, last = parts
    assert torch.equal(joined(last, first, middle), torch.cat([last, first, middle], dim=2))
    for part in (*parts, whole.flatten(1)[:, 7:30], whole[0], whole[:0, :, :3], whole[:, 1:4]):
        copied = contiguous(part)
        assert torch.equal(copied, part) and copied.is_contiguous()
    assert contiguous(whole) is whole


def test_rows_beyond_the_tensor_are_refused() -> None:
    for row in (-1, 3):
        with pytest.raises((IndexError, RuntimeError)):
            take_rows(torch.ones(3, 4), torch.tensor([0, row]))


@pytest.mark.parametrize("axes", [None, torch.tensor([0, 0, 1, 2, 1])], ids=str)
def test_angles_agree_with_torch(axes: torch.Tensor | None) -> None:
    positions = torch.tensor([[0, 1, 131071], [5, 70, 9], [1, 2, 3]])
    positions = positions[0] if axes is None else positions
    frequencies = 10000.0 ** -(torch.arange(5) / 5)
    used = positions.expand(5, 3) if axes is None else positions[axes]
    angles = (used.T.float() * frequencies).double()
    for computed in (rotary_angles, rotary_angles_twin):
        cos, sin = computed(positions, frequencies, axes, 1.3)
        torch.testing.assert_close(cos.double(), angles.cos() * 1.3, rtol=0, atol=3e-7)
        torch.testing.assert_close(sin.double(), angles.sin() * 1.3, rtol=0, atol=3e-7)
