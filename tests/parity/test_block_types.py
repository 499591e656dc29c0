"""Block types against the `gguf` package, bit for bit."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference

from runtime.errors import UnsupportedModelError
from runtime.kernels.workspace import TWIN_BYTES_PER_WEIGHT
from runtime.quant.block_types import BLOCK_TYPES, MXFP4_PAIRS, BlockType, block_type
from runtime.quant.formats.grids import GRIDS, PATH, load_grid
from runtime.quant.weight import Weight, dequantize, gather_rows
from tests.block_samples import NUMBERS, SMALL_FLOATS, random_blocks, set_scales
from tests.memory_profile import peak_bytes, recorded_memory
from tools.block_grids import grids_file, reference_grid

every_type = pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda t: t.name)


def expected_weights(data: np.ndarray, type: BlockType) -> np.ndarray:
    """Weights of the `gguf` package; numpy's for integers and doubles, which it lacks."""
    if type.name in NUMBERS:
        return data.view(NUMBERS[type.name]).astype(np.float32)
    with np.errstate(over="ignore"):
        return reference(data, GGMLQuantizationType(type.id))


def assert_same_bits(data: np.ndarray, type: BlockType) -> np.ndarray:
    expected = expected_weights(data, type)
    got = dequantize(torch.from_numpy(data), type).numpy()
    assert got.dtype == np.float32 and got.shape == expected.shape
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    return expected


@every_type
def test_sizes_and_names_are_those_of_the_gguf_package(type: BlockType) -> None:
    named = GGMLQuantizationType(type.id)
    assert named.name == type.name
    assert GGML_QUANT_SIZES[named] == (type.block_elements, type.block_bytes)
    assert block_type(type.name) is type


@every_type
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 4), (64, 96)])
def test_weights_equal_those_of_the_gguf_package_bit_for_bit(
    type: BlockType, shape: tuple[int, ...]
) -> None:
    expected = assert_same_bits(random_blocks(type, shape), type)
    assert np.isfinite(expected).all() and (expected.any() or shape == (1,))


@every_type
def test_denormal_scales_survive(type: BlockType) -> None:
    data = random_blocks(type, (4, 300))
    blocks = data.reshape(-1, type.block_bytes)
    set_scales(data, type, 6e-8)
    if type.name in ("F32", "BF16"):
        blocks[:, -1] &= 0x80
        blocks[:, -2] &= 0x7F
    if type.name == "MXFP4":
        blocks[:, 0] &= 1
    if type.name == "NVFP4":
        blocks[:, :4] &= 7
    assert assert_same_bits(data, type).any()


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_scale_of_eight_bits_equals_that_of_the_gguf_package(name: str) -> None:
    """The largest exponents of MXFP4 give infinities, in both."""
    type = block_type(name)
    data = random_blocks(type, (256, 1))
    data[:, SMALL_FLOATS[name][0]] = np.arange(256, dtype=np.uint8)[:, None]
    assert assert_same_bits(data, type).any()


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_those_of_the_gguf_package(name: str) -> None:
    grid = load_grid(name, torch.device("cpu"))
    assert np.array_equal(grid.numpy(), reference_grid(name))


def test_the_file_of_grids_is_the_output_of_its_tool() -> None:
    assert PATH.read_bytes() == grids_file()


@every_type
def test_dequantising_takes_no_more_memory_than_planned(type: BlockType) -> None:
    data = torch.from_numpy(random_blocks(type, (64, 4096 // type.block_elements)))
    dequantize(data, type)
    with recorded_memory() as recorded:
        dequantize(data, type)
    peak = peak_bytes(recorded)
    assert peak <= TWIN_BYTES_PER_WEIGHT * 64 * 4096, peak / (64 * 4096)


@every_type
def test_blocks_may_start_at_any_offset_of_a_buffer(type: BlockType) -> None:
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


@every_type
def test_gathering_reads_only_the_requested_rows(type: BlockType) -> None:
    rows, elements = 512, 1024
    data = torch.from_numpy(random_blocks(type, (rows, elements // type.block_elements)))
    weight, ids = Weight(data, type, (rows, elements)), torch.tensor([7, 500])
    gather_rows(weight, ids)
    with recorded_memory() as recorded:
        gather_rows(weight, ids)
    assert 0 < peak_bytes(recorded) <= 2 * elements * (TWIN_BYTES_PER_WEIGHT + 8)


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


def test_paired_nibbles_have_the_weights_of_nibbles_in_halves() -> None:
    """Ollama's first gpt-oss files: the gguf package knows only the order of halves."""
    halves = block_type("MXFP4")
    data = random_blocks(halves, (50, 3))
    blocks = data.reshape(-1, 17)
    nibbles = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
    paired = np.concatenate([blocks[:, :1], nibbles[:, 0::2] | nibbles[:, 1::2] << 4], axis=1)
    got = dequantize(torch.from_numpy(paired.reshape(data.shape)), MXFP4_PAIRS).numpy()
    expected = reference(data, GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
