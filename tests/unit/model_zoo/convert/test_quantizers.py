"""Quantisers: their errors on different rows, and what they refuse."""

import threading

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_zoo.convert.quantizers import rows as rows_module
from model_zoo.convert.quantizers.rows import QUANTIZABLE, quantize
from runtime.errors import ModelFileError
from runtime.quant.block_types import block_type
from runtime.quant.weight import dequantize
from tests.memory_profile import peak_bytes, recorded_memory
from tests.thread_counts import torch_threads

PLAIN = ("F32", "F16", "BF16")
BLOCKED = sorted(QUANTIZABLE - set(PLAIN))
REFERENCE_ROUNDING = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SEARCHED = sorted(set(BLOCKED) - set(REFERENCE_ROUNDING))
# Number of steps in the range of a group.
STEPS = {"Q2_K": 3, "Q3_K": 7, "Q4_K": 15, "Q5_K": 31, "Q6_K": 63}
HALF_LIMIT = 65504.0


def stored(rows: Tensor, type_name: str) -> Tensor:
    return quantize(rows, type_name, tensor="blk.0.attn_q.weight")


def read_back(rows: Tensor, type_name: str) -> Tensor:
    return dequantize(stored(rows, type_name), block_type(type_name))


def mean_squared(difference: Tensor) -> float:
    return difference.double().square().mean().item()


def lost(rows: Tensor, type_name: str) -> float:
    return mean_squared(read_back(rows, type_name) - rows)


def lost_by_gguf(rows: Tensor, type_name: str) -> float:
    kind = GGMLQuantizationType[type_name]
    read = gguf.quants.dequantize(gguf.quants.quantize(rows.numpy(), kind), kind)
    return mean_squared(torch.from_numpy(read) - rows)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_t(2, shape).astype(np.float32))


@st.composite
def rows_of_any_kind(draw) -> Tensor:
    """[2, 512] of any magnitude; some are sparse, of one sign, or have an outlier."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    present = random.random((2, 512)) < draw(st.sampled_from([1, 0.1]))
    rows = random.normal(size=(2, 512)) * present
    rows = np.abs(rows) if draw(st.booleans()) else rows
    rows[:, draw(st.integers(0, 511))] *= draw(st.sampled_from([0.0, 1.0, -100.0]))
    exponent = draw(st.sampled_from([-44, -39, -20, -8, -6, -4, -2, 0, 2]))
    return torch.from_numpy((rows * 10.0**exponent).astype(np.float32))


@pytest.mark.parametrize("rows", [normal(16, 512), heavy_tailed(16, 512)], ids=["normal", "heavy"])
@pytest.mark.parametrize("type_name", [*REFERENCE_ROUNDING, "F16", "BF16", "F32"])
def test_blocks_match_the_gguf_package(type_name, rows):
    expected = gguf.quants.quantize(rows.numpy(), GGMLQuantizationType[type_name])
    assert (stored(rows, type_name).numpy() == expected.view(np.uint8)).all()


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q5_0"])
def test_ties_are_rounded_as_in_the_gguf_package(type_name):
    rows = torch.arange(-127, 129).div(2).view(1, 256).float()
    expected = gguf.quants.quantize(rows.numpy(), GGMLQuantizationType[type_name])
    assert (stored(rows, type_name).numpy() == expected).all()


@pytest.mark.parametrize("rows", [normal(64, 512), heavy_tailed(64, 512)], ids=["normal", "heavy"])
@pytest.mark.parametrize(
    ("type_name", "reference"),
    [("Q4_K", "Q4_1"), ("Q5_K", "Q5_1"), ("IQ4_NL", "Q4_0"), ("Q6_K", "Q5_1"), ("MXFP4", "MXFP4")],
)
def test_a_searched_scale_has_a_smaller_error_than_the_reference(type_name, reference, rows):
    assert lost(rows, type_name) < lost_by_gguf(rows, reference)


@pytest.mark.parametrize("type_name", STEPS)
def test_uniform_weights_have_at_most_the_error_of_uniform_rounding(type_name):
    rows = torch.rand(64, 1024, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert lost(rows, type_name) < (2 / STEPS[type_name]) ** 2 / 12


@pytest.mark.parametrize("type_name", ["Q2_K", "Q4_K", "Q5_K"])
def test_weights_far_above_zero_have_at_most_the_error_of_uniform_rounding_from_zero(type_name):
    """The minimum that these types store cannot be above zero."""
    rows = torch.rand(64, 512, generator=torch.Generator().manual_seed(0)) + 1
    assert lost(rows, type_name) < (2 / STEPS[type_name]) ** 2 / 12


@pytest.mark.parametrize("rows", [normal(64, 512), heavy_tailed(64, 512)], ids=["normal", "heavy"])
def test_a_type_with_more_bits_has_a_smaller_error(rows):
    losses = [lost(rows, name) for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16")]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == len(losses)


@pytest.mark.parametrize("type_name", BLOCKED)
@given(rows=rows_of_any_kind())
@settings(max_examples=25)
def test_every_weight_stays_within_the_range_of_its_block(type_name, rows):
    read = read_back(rows, type_name)
    assert read.isfinite().all()
    block = block_type(type_name).block_elements
    reach = rows.view(-1, block).abs().amax(1, keepdim=True)
    # Subnormal halves are coarse; a scale may be rounded up to one.
    reach = reach * 1.35 + 128 * 2.0**-24
    assert (read.view(-1, block).abs() <= reach).all()


@pytest.mark.parametrize("type_name", SEARCHED)
@given(rows=rows_of_any_kind())
@settings(max_examples=25)
def test_the_error_never_exceeds_that_of_zeros(type_name, rows):
    assert lost(rows, type_name) <= mean_squared(rows) * (1 + 1e-6)


@pytest.mark.parametrize("type_name", BLOCKED)
def test_zeros_stay_zeros(type_name):
    rows = normal(3, 1024)
    rows[1] = 0.0
    rows[2, 256:512] = 0.0
    read = read_back(rows, type_name)
    assert (read[1] == 0).all() and (read[2, 256:512] == 0).all()
    assert (read[0] != 0).any()


@pytest.mark.parametrize("type_name", BLOCKED)
def test_requantising_to_the_same_type_changes_almost_nothing(type_name):
    rows = normal(32, 512)
    once = read_back(rows, type_name)
    assert mean_squared(read_back(once, type_name) - once) < 0.02 * mean_squared(once - rows)


@pytest.mark.parametrize("type_name", BLOCKED)
def test_the_relative_error_does_not_depend_on_the_magnitude(type_name):
    rows = normal(32, 512)
    relative = lost(rows, type_name)
    for scale in (2.0**-10, 2.0**12):
        assert lost(rows * scale, type_name) / scale**2 == pytest.approx(relative, rel=0.05)


@pytest.mark.parametrize("type_name", STEPS)
def test_subnormal_scales_cost_little_precision(type_name):
    """Q6_K divides by 32 and by 128: weights of 1e-4 give the smallest half."""
    rows = normal(32, 512)
    assert lost(rows * 1e-4, type_name) / 1e-8 < 1.1 * lost(rows, type_name)


@pytest.mark.parametrize("type_name", BLOCKED)
def test_the_largest_weights_are_representable(type_name):
    rows = torch.full((1, 512), HALF_LIMIT)
    rows[0, ::2] *= -1
    read = read_back(rows, type_name)
    assert read.isfinite().all()
    assert lost(rows, type_name) < 0.07 * HALF_LIMIT**2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("type_name", sorted(QUANTIZABLE))
def test_weights_that_are_not_finite_are_refused(type_name, bad):
    rows = normal(4, 512)
    rows[2, 300] = bad
    with pytest.raises(ModelFileError, match=r"`blk.0.attn_q.weight` holds .* not finite"):
        stored(rows, type_name)


@pytest.mark.parametrize("type_name", sorted(QUANTIZABLE - {"F32", "BF16", "MXFP4"}))
def test_weights_beyond_the_range_of_the_type_are_refused(type_name):
    rows = normal(4, 512)
    rows[0, 5] = -70000.0
    with pytest.raises(ModelFileError, match=r"attn_q.weight` holds a weight of magnitude 7e\+04"):
        stored(rows, type_name)


def test_types_with_wide_exponents_exceed_the_range_of_halves():
    rows = torch.full((1, 32), 1e30)
    for type_name in ("F32", "BF16", "MXFP4"):
        assert (read_back(rows, type_name) / rows - 1).abs().max() < 0.2


@pytest.mark.parametrize("type_name", BLOCKED)
def test_grouping_of_rows_changes_only_rounding(type_name):
    rows = heavy_tailed(9, 768)
    one_by_one = torch.cat([stored(row, type_name) for row in rows.split(1)])
    apart = dequantize(one_by_one, block_type(type_name))
    assert mean_squared(apart - rows) == pytest.approx(lost(rows, type_name), rel=1e-2)
    if type_name in REFERENCE_ROUNDING:
        assert (stored(rows, type_name) == one_by_one).all()


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q6_K"])
def test_the_number_of_threads_changes_nothing(type_name):
    rows = normal(600, 1024)
    with torch_threads(1):
        alone = stored(rows, type_name)
    with torch_threads(3):
        together = stored(rows, type_name)
        assert torch.get_num_threads() == 3
    assert (alone == together).all()


def test_an_error_in_a_thread_reaches_the_caller():
    rows = normal(600, 1024)
    rows[599, 1023] = float("nan")
    with torch_threads(2):
        with pytest.raises(ModelFileError, match="not finite"):
            stored(rows, "Q8_0")
        assert torch.get_num_threads() == 2


def test_only_threads_that_quantise_compute_with_one_thread(monkeypatch):
    quantising, others = [], []
    q8_0 = rows_module._QUANTIZERS["Q8_0"]

    def observed(slab: Tensor) -> Tensor:
        quantising.append(torch.get_num_threads())
        other = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        other.start()
        other.join()
        return q8_0(slab)

    monkeypatch.setitem(rows_module._QUANTIZERS, "Q8_0", observed)
    with torch_threads(3):
        stored(normal(600, 1024), "Q8_0")
    assert set(quantising) == {1} and set(others) == {3}


@pytest.mark.parametrize("type_name", sorted(QUANTIZABLE))
def test_leading_dimensions_and_the_input_are_kept(type_name):
    rows = normal(2, 3, 512)
    before = rows.clone()
    blocks = stored(rows, type_name)
    assert blocks.shape == (2, 3, block_type(type_name).row_bytes(512))
    assert blocks.dtype == torch.uint8
    assert (blocks.view(6, -1) == stored(rows.view(6, 512), type_name)).all()
    assert (rows == before).all()


@pytest.mark.parametrize("type_name", BLOCKED)
def test_parameters_and_inference_tensors_are_accepted(type_name):
    rows = normal(2, 512)
    expected = stored(rows, type_name)
    assert (stored(torch.nn.Parameter(rows), type_name) == expected).all()
    with torch.inference_mode():
        assert (stored(rows.clone(), type_name) == expected).all()


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K", "IQ4_NL"])
def test_memory_does_not_grow_with_the_rows(type_name):
    with torch_threads(1):
        few, many = (memory_beside_the_result(normal(n, 1024), type_name) for n in (512, 2048))
    assert many < 1.05 * few


def memory_beside_the_result(rows: Tensor, type_name: str) -> int:
    with recorded_memory() as recorded:
        blocks = stored(rows, type_name)
    return peak_bytes(recorded) - blocks.numel()
