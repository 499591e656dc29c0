"""Rows of quantised matrices: the kernel against its twin."""

import pytest
import torch

from runtime.kernels.embedding import embedding_rows, groups_of, known_ids, known_ids_twin
from runtime.quant.block_types import BLOCK_TYPES, BlockType
from runtime.quant.weight import gather_rows
from tests.kernels.native_kernels import require_native_kernels
from tests.kernels.random_weights import random_weight


@pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda type: type.name)
def test_rows_are_those_of_the_twin_to_the_bit(type: BlockType) -> None:
    weight = random_weight(type, 11, 3 * max(type.block_elements, 7))
    ids = torch.tensor([10, 0, 3, 3])
    expected = gather_rows(weight, ids)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(embedding_rows(weight, ids, dtype), expected.to(dtype))
    assert embedding_rows(weight, ids[:0], torch.float32).shape == expected[:0].shape


@pytest.mark.parametrize("id", [-1, 11])
def test_ids_outside_the_rows_are_refused(id: int) -> None:
    require_native_kernels()
    weight = random_weight(BLOCK_TYPES[8], 11, 64)
    with pytest.raises(IndexError):
        embedding_rows(weight, torch.tensor([1, id]), torch.float32)


def test_ids_have_a_row_or_the_first_one_and_a_group() -> None:
    ids = torch.tensor([[0, 6, 7], [8, 2**40, 5]])
    assert groups_of(ids, 3).tolist() == [[0, 2, 2], [2, 2**40 // 3, 1]]
    assert known_ids(ids.flatten(), 7).tolist() == [0, 6, 0, 0, 0, 5]
    assert torch.equal(known_ids(ids, 7), known_ids_twin(ids, 7))
