"""Planes, and the kernel that dequantises them, against the blocks from which they are made."""

import pytest
import torch

from runtime.kernels.triton.dequantize import dequantized
from runtime.quant.block_types import BlockType
from runtime.quant.weight import PLANAR_TYPES, Weight
from tests.block_samples import random_blocks

CPU = torch.device("cpu")
planar_types = pytest.mark.parametrize("type", PLANAR_TYPES.values(), ids=lambda t: t.blocks.name)


def random_pair(type: BlockType, rows: int, blocks: int) -> tuple[Weight, Weight]:
    """The same weights in blocks and in planes."""
    assert type.blocks is not None
    data = torch.from_numpy(random_blocks(type.blocks, (rows, blocks)))
    weight = Weight(data, type.blocks, (rows, blocks * type.block_elements))
    return weight, weight.in_planes(CPU)


@planar_types
def test_planes_hold_the_bits_of_blocks(type: BlockType) -> None:
    weight, planar = random_pair(type, 5, 3)
    assert planar.data.stride(0) % 16 == 0
    assert planar.data.stride(0) - weight.data.stride(0) in range(16)
    assert torch.equal(planar.dequantize(), weight.dequantize())
    stacked = Weight(weight.data[:4].unflatten(0, (2, 2)), weight.type, (2, 2, weight.shape[1]))
    assert torch.equal(stacked.in_planes(CPU).dequantize(), stacked.dequantize())


@planar_types
def test_one_launch_dequantises_to_the_bits_of_the_twin(type: BlockType) -> None:
    weight, planar = random_pair(type, 7, 3)
    expected = weight.dequantize()
    assert torch.equal(dequantized(planar, torch.float32), expected)
    ids = torch.tensor([6, 0, 6])
    assert torch.equal(dequantized(planar, torch.float32, ids), expected[ids])
    half = dequantized(planar, torch.float16, ids).nan_to_num()
    assert torch.equal(half, expected[ids].half().nan_to_num())


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "IQ1_M"])
def test_parts_and_strided_rows_are_dequantised(name: str) -> None:
    weight, planar = random_pair(PLANAR_TYPES[name], 90, 1)
    expected = weight.dequantize()
    assert torch.equal(dequantized(planar.outputs(3, 88), torch.float32), expected[3:88])
    data = planar.data[1::2]
    odd = Weight(data, planar.type, (len(data), planar.shape[1]))
    assert torch.equal(dequantized(odd, torch.float32), expected[1::2])
    half = dequantized(planar, torch.float16).nan_to_num()
    torch.testing.assert_close(half, expected.half().nan_to_num(), rtol=0, atol=0)
