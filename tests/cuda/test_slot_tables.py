"""Lookups in tables of slots, in Triton's interpreter, against their twin."""

import pytest
import torch

from runtime.kernels.slot_tables import slot_entries_twin
from runtime.kernels.triton.slot_tables import ROWS, slot_entries

DRAW = torch.Generator().manual_seed(12)


@pytest.mark.parametrize("page_tokens", [1, 16, 48])
@pytest.mark.parametrize("rows", [0, 1, ROWS + 3])
def test_entries_are_those_of_the_twin(rows: int, page_tokens: int) -> None:
    table = torch.randint(0, 2**31 - 1, (5, 12), dtype=torch.int32, generator=DRAW)
    slots = torch.randint(0, 5, (rows,), dtype=torch.int32, generator=DRAW)
    indices = torch.randint(0, 12 * page_tokens, (rows,), generator=DRAW)
    for given in (indices, None):
        got = slot_entries(table, slots, given, page_tokens=page_tokens)
        expected = slot_entries_twin(table, slots, given, page_tokens=page_tokens)
        assert got.dtype == torch.int64 and torch.equal(got, expected)
