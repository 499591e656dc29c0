"""Rows that attend to any interval of a cache, or to nothing."""

import pytest
import torch
from torch import Tensor

from runtime.kernels import attention as room
from runtime.kernels.attention import Scoring, paged_attention, paged_attention_twin, write_cache
from runtime.kernels.native import library
from runtime.worker.model import AttentionPlan, LayerPages, RowSpan
from tests.kernels.test_attention import SCALE, by_definition

PAGE_TOKENS, PAGES, KV_HEADS, HEADS, KEY_DIM, VALUE_DIM = 4, 30, 2, 6, 16, 12
# Per sequence: slot, first position, and for each row what it sees.
SCENES = {
    "images": [
        (1, 0, [(0, 0), (0, 0), (0, 9), (0, 17), (0, 17), (20, 26)]),
        (0, 70, [(8, 25)]),
        (2, 3, [(0, 0), (0, 0)]),
    ],
    "all of it ahead": [(0, 0, [(0, 38), (0, 38), (5, 12), (12, 38)]), (2, 9, [(1, 2)] * 4)],
    "windows far behind": [(0, 39, [(31, 40)]), (1, 11, [(3, 12)]), (2, 22, [(14, 23)])],
    "nothing": [(0, 5, [(0, 0)]), (1, 0, [(0, 0), (0, 0)])],
}


def scene(name: str, *, bounds: bool) -> tuple[Tensor, LayerPages, AttentionPlan]:
    """Entries that no row sees are NaN; with `bounds` the host knows what each sequence sees."""
    draw = torch.Generator().manual_seed(3)
    table = torch.randperm(PAGES, generator=draw).view(3, -1).int()
    keys = torch.full((PAGES, PAGE_TOKENS, KV_HEADS, KEY_DIM), torch.nan)
    values = torch.full((PAGES, PAGE_TOKENS, KV_HEADS, VALUE_DIM), torch.nan)
    slots, seen, spans = [], [], []
    for slot, start, rows in SCENES[name]:
        known = (min(b for b, _ in rows), max(e for _, e in rows)) if bounds else ()
        spans.append(RowSpan(len(slots), len(slots) + len(rows), slot, start, *known))
        slots += [slot] * len(rows)
        seen += rows
        for index in {i for begin, end in rows for i in range(begin, end)}:
            page, offset = table[slot, index // PAGE_TOKENS], index % PAGE_TOKENS
            keys[page, offset] = torch.randn(KV_HEADS, KEY_DIM, generator=draw)
            values[page, offset] = torch.randn(KV_HEADS, VALUE_DIM, generator=draw)
    visible = torch.tensor(seen, dtype=torch.int32)
    plan = AttentionPlan(
        table, torch.tensor(slots, dtype=torch.int32), visible[:, 0].contiguous(),
        visible[:, 1].contiguous(), torch.zeros(0, dtype=torch.int64), tuple(spans),
    )  # fmt: skip
    queries = torch.randn(len(slots), HEADS, KEY_DIM, generator=draw)
    return queries, LayerPages(keys, values, 0), plan


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("bounds", [True, False])
@pytest.mark.parametrize("at_once", [1 << 25, 700])
def test_the_twin_attends_to_any_interval(name, bounds, at_once, monkeypatch) -> None:
    queries, pages, plan = scene(name, bounds=bounds)
    monkeypatch.setattr(room, "TWIN_ELEMENTS", at_once)
    expected = by_definition(queries, pages, plan, Scoring(SCALE)).float()
    got = paged_attention_twin(queries, pages, plan, Scoring(SCALE))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCENES)
def test_the_fast_path_attends_to_any_interval(name) -> None:
    if library() is None:
        pytest.skip("no C compiler here, so there is no fast path to test")
    queries, pages, plan = scene(name, bounds=True)
    expected = by_definition(queries, pages, plan, Scoring(SCALE)).float()
    got = paged_attention(queries, pages, plan, Scoring(SCALE))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_the_twin_reads_no_page_before_the_window(monkeypatch) -> None:
    queries, pages, plan = scene("windows far behind", bounds=True)
    read = []
    attend = room._attend
    monkeypatch.setattr(room, "_attend", lambda *a: read.append(a[4]) or attend(*a))
    paged_attention_twin(queries, pages, plan, Scoring(SCALE))
    assert [used.tolist() for used in read] == [[[7, 8, 9], [0, 1, 2], [3, 4, 5]]]


def test_a_plan_of_another_length_than_the_rows_fills_the_cells_it_names() -> None:
    _, pages, plan = scene("nothing", bounds=True)
    cells = torch.tensor([5, 90, 41])
    keys, values = torch.rand(3, KV_HEADS, KEY_DIM), torch.rand(3, KV_HEADS, VALUE_DIM)
    plan = AttentionPlan(
        plan.page_table, plan.row_slot, plan.visible_begin, plan.visible_end, cells, plan.spans
    )
    write_cache(keys, values, pages, plan)
    assert torch.equal(pages.keys.flatten(0, 1)[cells], keys)
    assert torch.equal(pages.values.flatten(0, 1)[cells], values)
    assert plan.sees_nothing and not scene("images", bounds=True)[2].sees_nothing
