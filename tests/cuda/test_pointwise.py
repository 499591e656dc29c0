"""Norms, rotations and curves of CUDA devices in Triton's interpreter, against their twins."""

from functools import partial

import pytest
import torch
from torch import Tensor

from runtime.kernels import moments, pointwise
from runtime.kernels.activations import MOST_ROUNDED_ROWS, RoundedActivations
from runtime.kernels.triton import pointwise as kernels
from runtime.kernels.triton.rounded import planes_of, rounded
from runtime.kernels.xielu import xielu_twin
from runtime.quant.weight import Compute

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
DRAW = torch.Generator().manual_seed(3)


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "library", lambda: None)
    monkeypatch.setattr(pointwise, "has_kernels", lambda device: True)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    launch = kernels.launch

    def counted(kernel, *arguments, **options) -> None:
        names.append(kernel.__name__)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(kernels, "launch", counted)
    return names


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW) * 4


def parts(*shape: int) -> Tensor:
    """Rows that are parts of longer ones."""
    return noise(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]


@pytest.mark.parametrize("x", [noise(3, 100), parts(3, 33), parts(2, 5, 37), noise(2, 2, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms(x: Tensor, dtype: torch.dtype, launches: list[str]) -> None:
    x, weight, bias = x.to(dtype), noise(x.shape[-1]), noise(x.shape[-1])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 1e-3}
    for got, expected in (
        (pointwise.rms_norm(x, weight, 1e-5), pointwise.rms_norm_twin(x, weight, 1e-5)),
        (pointwise.rms_norm(x, None, 1e-2), pointwise.rms_norm_twin(x, None, 1e-2)),
        (
            pointwise.layer_norm(x, weight, bias, 1e-5),
            pointwise.layer_norm_twin(x, weight, bias, 1e-5),
        ),
    ):
        torch.testing.assert_close(got, expected, **close)
    assert launches == ["norm_kernel"] * 3


@pytest.mark.parametrize("x", [noise(2, 3, 32), parts(2, 3, 21)])
def test_norms_of_parts_with_weights_of_their_own(x: Tensor) -> None:
    weight, bias = noise(3, x.shape[-1]), noise(3, x.shape[-1])
    got, expected = (f(x, weight, 1e-5) for f in (pointwise.rms_norm, pointwise.rms_norm_twin))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    layer_norms = pointwise.layer_norm, pointwise.layer_norm_twin
    got, expected = (f(x, weight, bias, 1e-5) for f in layer_norms)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make", [noise, parts])
def test_norms_of_sums(make, dtype: torch.dtype, scale: float, launches: list[str]) -> None:
    x, y, weight, bias = make(3, 100).to(dtype), make(3, 100).to(dtype), noise(100), noise(100)
    added = pointwise.add_twin_(x.clone(), y, scale=scale)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 1e-3}
    for factors, expected in (
        ((weight, None), pointwise.rms_norm_twin(added, weight, 1e-5)),
        ((None, None), pointwise.rms_norm_twin(added, None, 1e-5)),
        ((weight, bias), pointwise.layer_norm_twin(added, weight, bias, 1e-5)),
    ):
        total = torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)
        got = pointwise.add_norm_(total, y, *factors, 1e-5, scale=scale)
        assert torch.equal(total, added)
        torch.testing.assert_close(got, expected, **close)
    assert launches == ["add_norm_kernel"] * 3


@pytest.mark.parametrize("biased", [True, False], ids=["layer", "rms"])
def test_a_norm_of_a_sum_may_be_in_float32(biased: bool, launches: list[str]) -> None:
    """With the bits of the norm in float32 of the sum in its type."""
    x, y, weight, bias = parts(3, 100).half(), parts(3, 100).half(), noise(100), noise(100)
    total = pointwise.add_twin_(x.clone(), y, scale=0.5).float()
    norm = partial(pointwise.layer_norm, bias=bias) if biased else pointwise.rms_norm
    given = weight, bias if biased else None
    got = pointwise.add_norm_(x, y, *given, 1e-5, scale=0.5, dtype=torch.float32)
    assert got.dtype == torch.float32 and torch.equal(got, norm(total, weight, eps=1e-5))
    assert launches == ["add_norm_kernel", "norm_kernel"]


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN)")
@pytest.mark.parametrize("rounding", [Compute.FINE, Compute.FAST], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("summed", [True, False], ids=["sum", "rows"])
def test_rounded_norms_have_the_bits_of_the_norm_and_then_its_rounding(
    summed: bool, biased: bool, dtype: torch.dtype, rounding: Compute, launches: list[str]
) -> None:
    """Also of a group of zeros, and of a row with a number that is not finite."""
    x, y, weight = parts(3, 96).to(dtype), parts(3, 96).to(dtype), noise(96)
    weight[32:64], x[1, 40] = 0.0, torch.inf
    bias = weight.flip(0).roll(32) if biased else None
    norm = pointwise.rms_norm if bias is None else partial(pointwise.layer_norm, bias=bias)
    total = pointwise.add_twin_(x.clone(), y, scale=0.5) if summed else x.clone()
    expected = norm(total, weight, eps=1e-5)
    launches.clear()
    got = pointwise.rounded_norm_(
        x, y if summed else None, weight, bias, 1e-5, scale=0.5, rounding=rounding
    )
    assert isinstance(got, RoundedActivations) and launches == ["add_norm_kernel"]
    assert same(x, total) and same(got.x, expected)
    integers = rounded(expected, planes_of(rounding))
    finite = torch.tensor([0, 2])  # integers beside a scale that is NaN are any
    assert torch.equal(got.rounded.planes[:, :, finite], integers.planes[:, :, finite])
    assert torch.equal(got.rounded.sums[finite], integers.sums[finite])
    assert same(got.rounded.scales, integers.scales)


def same(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("summed", [True, False], ids=["sum", "rows"])
def test_norms_of_many_rows_are_not_rounded(summed: bool, launches: list[str]) -> None:
    x, y, weight = noise(MOST_ROUNDED_ROWS + 1, 32), noise(MOST_ROUNDED_ROWS + 1, 32), noise(32)
    total = x + y if summed else x.clone()
    got = pointwise.rounded_norm_(
        x, y if summed else None, weight, None, 1e-5, rounding=Compute.FINE
    )
    assert torch.equal(got, pointwise.rms_norm(total, weight, 1e-5))
    assert launches == ["add_norm_kernel" if summed else "norm_kernel", "norm_kernel"]


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_erf", "gelu_quick", "sigmoid", "softplus"])
@pytest.mark.parametrize("make", [noise, parts])
def test_gates(name: str, make, launches: list[str]) -> None:
    gate, up = make(3, 1500), make(3, 1500)
    gate[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gated, twin = (getattr(pointwise, f"{name}_mul{end}") for end in ("", "_twin"))
    for got, expected in (
        (gated(gate, up), twin(gate, up)),
        (pointwise.curve_alone(gated, gate), twin(gate)),
    ):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-5)
    assert launches == ["gate_kernel"] * 2


def test_relu_squared(launches: list[str]) -> None:
    x = torch.cat([noise(500), torch.tensor([0.0, -0.0, torch.nan])])
    got, expected = pointwise.relu_squared(x), pointwise.relu_squared_mul_twin(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert launches == ["gate_kernel"]


@pytest.mark.parametrize("make", [noise, parts])
def test_products(make, launches: list[str]) -> None:
    one, other = make(3, 1500), make(3, 1500)
    assert torch.equal(pointwise.mul(one, other), one * other)
    assert launches == ["gate_kernel"]


def test_one_vector_multiplies_all_rows(launches: list[str]) -> None:
    x, factors = noise(3, 1500).half(), noise(1500)
    expected = (x.float() * factors).half()
    assert torch.equal(pointwise.mul(x, factors.expand_as(x)), expected)
    assert launches == ["gate_kernel"]


@pytest.mark.parametrize("x", [noise(1, 1), noise(3, 100), parts(3, 33), noise(4, 1, 64)[:, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_moments_of_rows(x: Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "has_kernels", lambda device: True)
    x = (x + 3).to(dtype)
    found, expected = moments.row_moments(x), moments.row_moments_twin(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    alone = moments.row_moments(x[-1:])
    assert all(torch.equal(one, whole[-1:]) for one, whole in zip(alone, found, strict=True))


def test_softcap_is_exact_near_zero_too(launches: list[str]) -> None:
    x = torch.cat([noise(500), noise(500) * 1e-3, noise(100) * 1e3])
    got, expected = pointwise.softcap(x, 3.0), pointwise.softcap_twin(x, 3.0)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=0)
    assert launches == ["gate_kernel"]


def test_xielu_is_exact_near_zero_too(launches: list[str]) -> None:
    numbers = {"positive": 0.8, "negative": 1.1, "beta": 0.5, "eps": -1e-6}
    near, far = torch.cat([noise(500) * 1e-3, noise(700) * 1e-7]), noise(3, 500) * 10
    for x, atol in ((near, 0.0), (far, 1e-6)):
        got, expected = kernels.xielu(x, **numbers), xielu_twin(x, **numbers)
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=atol)
    assert launches == ["xielu_kernel"] * 2


@pytest.mark.parametrize("pairs", [1, 35, 64])
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("several", [False, True], ids=["one axis", "axes"])
def test_angles(several: bool, tokens: int, pairs: int, launches: list[str]) -> None:
    """Of 131072 positions; the angles of a row do not depend on others."""
    positions = torch.randint(0, 1 << 17, (3, tokens), generator=DRAW)
    axes = torch.randint(0, 3, (pairs,), generator=DRAW) if several else None
    positions = positions if several else positions[0]
    frequencies = 1e4 ** -(torch.arange(pairs) / pairs)
    got = pointwise.rotary_angles(positions, frequencies, axes, 1.2)
    expected = pointwise.rotary_angles_twin(positions, frequencies, axes, 1.2)
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-7)
    assert launches == ["angles_kernel"]
    alone = pointwise.rotary_angles(positions[..., -1:], frequencies, axes, 1.2)
    assert all(torch.equal(one, all[-1:]) for one, all in zip(alone, got, strict=True))


def test_positions_on_several_axes_need_the_axis_of_each_frequency() -> None:
    with pytest.raises(ValueError, match="the axis of each frequency"):
        pointwise.rotary_angles(torch.zeros(3, 2, dtype=torch.int64), noise(4), None, 1.0)


@pytest.mark.parametrize("rotated", [80, 40, 26])
@pytest.mark.parametrize("make", [noise, parts])
def test_rotations(rotated: int, make, launches: list[str]) -> None:
    x, cos, sin = make(5, 3, 80), noise(5, rotated // 2), noise(5, rotated // 2)
    for got, expected in (
        (pointwise.rope_halves(x, cos, sin), pointwise.rope_halves_twin(x, cos, sin)),
        (pointwise.rope_interleaved(x, cos, sin), pointwise.rope_interleaved_twin(x, cos, sin)),
    ):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)
    assert launches == ["rope_kernel"] * 2


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="a gate"):
        pointwise.silu_mul(noise(2, 3), noise(2, 4))
    with pytest.raises(ValueError, match="rotate 20 dimensions"):
        pointwise.rope_halves(noise(2, 1, 16), noise(2, 10), noise(2, 10))
