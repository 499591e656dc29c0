"""Lookups in tables of slots, by C, against their twin and by definition."""

import pytest
import torch
from torch import Tensor

from runtime.kernels.slot_tables import slot_entries, slot_entries_twin

SLOTS, LENGTH, ROWS = 5, 12, 131
DRAW = torch.Generator().manual_seed(11)


def random_table() -> Tensor:
    return torch.randint(0, 2**31 - 1, (SLOTS, LENGTH), dtype=torch.int32, generator=DRAW)


@pytest.mark.parametrize("page_tokens", [1, 16, 48])
@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_entries_are_those_of_the_twin(rows: int, page_tokens: int) -> None:
    table = random_table()
    slots = torch.randint(0, SLOTS, (rows,), dtype=torch.int32, generator=DRAW)
    indices = torch.randint(0, LENGTH * page_tokens, (rows,), generator=DRAW)
    for given in (indices, None):
        got = slot_entries(table, slots, given, page_tokens=page_tokens)
        assert got.dtype == torch.int64
        assert torch.equal(got, slot_entries_twin(table, slots, given, page_tokens=page_tokens))
    for row, (slot, index) in enumerate(zip(slots.tolist(), indices.tolist(), strict=True)):
        cells = [
            page * page_tokens + n for page in table[slot].tolist() for n in range(page_tokens)
        ]
        assert cells[index] == slot_entries(table, slots, indices, page_tokens=page_tokens)[row]


@pytest.mark.parametrize(("slot", "index"), [(-1, 0), (SLOTS, 0), (0, -1), (0, LENGTH * 4)])
def test_entries_outside_the_table_are_refused(slot: int, index: int) -> None:
    slots, indices = torch.tensor([0, slot], dtype=torch.int32), torch.tensor([3, index])
    with pytest.raises(IndexError):
        slot_entries(random_table(), slots, indices, page_tokens=4)
