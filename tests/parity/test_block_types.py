"""Block types against the `gguf` package, bit for bit."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference

from runtime.errors import UnsupportedModelError
from runtime.quant import BLOCK_TYPES, BlockType, Weight, block_type, dequantize, gather_rows

# Byte offsets of the half-precision scales in a block.
HALVES = {"F16": (0,), "Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0], np.float16)

every_type = pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda t: t.name)


def random_blocks(type: BlockType, shape: tuple[int, ...], *, seed: int = 0) -> np.ndarray:
    """Every bit pattern but infinities and NaNs; shape counts blocks in its last place."""
    draw = np.random.default_rng(seed)
    data = draw.integers(0, 256, (*shape, type.block_bytes), dtype=np.uint8)
    if type.name in ("F32", "BF16"):
        data[..., -1] &= 0xBF  # below 2: neither infinity nor NaN, denormals included
    for offset in HALVES.get(type.name, ()):
        data[..., offset + 1] &= 0xBB
        extreme = draw.choice(EXTREMES, shape).view(np.uint8).reshape(*shape, 2)
        chosen = draw.random(shape) < 0.3
        data[chosen, offset : offset + 2] = extreme[chosen]
    return data.reshape(*shape[:-1], shape[-1] * type.block_bytes)


@every_type
def test_sizes_and_names_are_those_of_the_gguf_package(type: BlockType) -> None:
    named = GGMLQuantizationType(type.id)
    assert named.name == type.name
    assert GGML_QUANT_SIZES[named] == (type.block_elements, type.block_bytes)
    assert block_type(type.name) is type


@every_type
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 4), (64, 96)])
def test_weights_mean_bit_for_bit_what_the_gguf_package_says(
    type: BlockType, shape: tuple[int, ...]
) -> None:
    data = random_blocks(type, shape)
    expected = reference(data, GGMLQuantizationType(type.id))
    got = dequantize(torch.from_numpy(data), type).numpy()
    assert got.dtype == np.float32 and got.shape == expected.shape
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    assert np.isfinite(expected).all() and (expected.any() or shape == (1,))


@every_type
def test_denormal_scales_survive(type: BlockType) -> None:
    data = random_blocks(type, (4, 300), seed=3)
    for offset in HALVES.get(type.name, ()):
        blocks = data.reshape(-1, type.block_bytes)
        blocks[:, offset : offset + 2] = np.array([6e-8], np.float16).view(np.uint8)
    if type.name in ("F32", "BF16"):
        data.reshape(-1, type.block_bytes)[:, -1] &= 0x80
        data.reshape(-1, type.block_bytes)[:, -2] &= 0x7F
    expected = reference(data, GGMLQuantizationType(type.id))
    got = dequantize(torch.from_numpy(data), type).numpy()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    assert expected.any()


@every_type
def test_bytes_may_begin_anywhere_in_a_larger_buffer(type: BlockType) -> None:
    data = random_blocks(type, (6, 2))
    buffer = torch.zeros(3 * 4 + data.size, dtype=torch.uint8)
    buffer[12:] = torch.from_numpy(data).flatten()
    view = buffer[12:].view(data.shape)
    assert torch.equal(dequantize(view, type), dequantize(torch.from_numpy(data), type))


@every_type
def test_gathered_rows_are_the_rows_of_the_whole_table(type: BlockType) -> None:
    data = torch.from_numpy(random_blocks(type, (9, 3)))
    weight = Weight(data, type, (9, 3 * type.block_elements))
    ids = torch.tensor([8, 0, 3, 3])
    assert torch.equal(gather_rows(weight, ids), weight.dequantize()[ids])
    assert gather_rows(weight, ids[:0]).shape == (0, 3 * type.block_elements)


def test_a_weight_knows_its_bytes_and_refuses_a_wrong_shape() -> None:
    type = block_type("Q4_K")
    data = torch.zeros(4, 2 * 144, dtype=torch.uint8)
    assert Weight(data, type, (4, 512)).nbytes == data.numel()
    with pytest.raises(AssertionError):
        Weight(data, type, (4, 256))
    with pytest.raises(AssertionError):
        Weight(data, type, (4, 500))


def test_an_unknown_block_type_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="IQ9_Z"):
        block_type("IQ9_Z")
