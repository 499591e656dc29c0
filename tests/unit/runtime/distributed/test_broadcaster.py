"""The batch of a step as other ranks receive it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.distributed.broadcaster import Broadcaster, follow
from runtime.worker.model import AttentionPlan, Batch, RowSpan
from runtime.worker.pinned_buffer import ALIGNMENT

CPU, SLOTS = torch.device("cpu"), 5
TABLES = (torch.zeros(SLOTS, 7, dtype=torch.int32), torch.zeros(SLOTS, 3, dtype=torch.int32))


class Wire:
    """Control channel and collectives between rank 0 and another rank, which follows it later."""

    def __init__(self) -> None:
        self._messages, self._tensors = deque[bytes](), deque[Tensor]()

    def send(self, message: bytes) -> None:
        self._messages.append(message)

    def receive(self) -> bytes:
        if not self._messages:
            raise EOFError
        return self._messages.popleft()

    def sent(self, x: Tensor) -> Tensor:
        self._tensors.append(x)
        return x

    def received(self, x: Tensor) -> Tensor:
        return x.copy_(self._tensors.popleft())


class Ranks:
    def __init__(self, broadcast) -> None:
        self.broadcast = broadcast


class Follower:
    """The model and the pages of a rank: keeps what it is given."""

    page_tables = TABLES

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.writes: list[tuple[Tensor, Tensor]] = []

    def states(self, batch: Batch, cache: object) -> Tensor:
        self.batches.append(batch)
        return torch.empty(0)

    def write_pages(self, cells: Tensor, pages: Tensor) -> None:
        self.writes.append((cells, pages))

    def copy_pages(self, copies: list[object]) -> None:
        assert not copies

    def shift_keys(self, shifts: list[object]) -> None:
        assert not shifts


def batch_of(rows: int, outputs: int, *, axes: int = 0, image_rows: int = 0) -> Batch:
    """Of one sequence and two groups, the second of which has rows of images if there are any."""
    count = iter(range(10**6))

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.tensor([next(count) for _ in range(size)], dtype=dtype).view(shape)

    span = RowSpan(0, rows, 2, 4, seen_begin=0, seen_end=4 + rows)
    slots = torch.full((rows,), 2, dtype=torch.int32)
    plans = [
        AttentionPlan(
            table, slots, numbers(rows, dtype=torch.int32), numbers(rows, dtype=torch.int32),
            numbers(rows), (span,),
        )
        for table in TABLES
    ]  # fmt: skip
    batch = Batch(numbers(rows), numbers(rows), numbers(outputs), tuple(plans))
    if image_rows:
        seen = torch.arange(rows) > 0
        plans[1] = replace(plans[1], write_cell=numbers(image_rows + 1), after_image=seen)
        features = torch.randn(image_rows, 4)
        batch = replace(
            batch, plans=tuple(plans), image_rows=numbers(image_rows), image_features=features
        )
    return batch if not axes else replace(batch, axes=numbers(axes, rows))


def tensors_of(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for part in (batch, *batch.plans):
        for name in part.__dataclass_fields__:
            value = getattr(part, name)
            if isinstance(value, Tensor):
                yield name, value


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("more", [{}, {"axes": 3}, {"image_rows": 1}, {"image_rows": 2}], ids=str)
def test_other_ranks_receive_the_batch_at_aligned_addresses(
    rows: int, outputs: int, more: dict[str, int]
) -> None:
    """As rank 0 has it: for others, Triton would compile kernels anew while all ranks wait."""
    wire, follower, batch = Wire(), Follower(), batch_of(rows, outputs, **more)
    broadcaster = Broadcaster(wire, Ranks(wire.sent))
    cells, pages = torch.arange(5), torch.arange(5, dtype=torch.int32)
    for some in (slice(0, 1), slice(1, 5)):
        broadcaster.note_pages(cells[some], pages[some])
    broadcaster.send_batch(batch)
    broadcaster.note_pages(cells + 9, pages + 9)
    broadcaster.send_batch(batch)
    broadcaster.send_batch(batch)
    follow(follower, follower, wire, Ranks(wire.received), CPU)
    for number, (got, written) in enumerate(zip(follower.batches, follower.writes, strict=True)):
        found, expected = dict(tensors_of(got)), dict(tensors_of(batch))
        assert found.keys() == expected.keys()
        found |= dict(zip(("cells", "pages"), written, strict=True))
        count = 5 if number < 2 else 0
        expected |= {"cells": cells[:count] + 9 * number, "pages": pages[:count] + 9 * number}
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name
            assert tensor.data_ptr() % ALIGNMENT == 0, name
        assert [plan.spans for plan in got.plans] == [plan.spans for plan in batch.plans]
    assert len(follower.batches) == 3
