"""The tokens that indexers choose: the twin against plain torch, the kernels against the twin."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention import Scoring, paged_attention
from runtime.kernels.cache_rows import decode_rows, encode_rows
from runtime.kernels.token_choice import Budget, choose_tokens, choose_tokens_twin, sees_few
from runtime.kv.cache_types import CacheType
from runtime.worker.model import AttentionPlan, LayerPages, QuantizedRows, RowForm, RowSpan
from tests.kernels.native_kernels import NATIVE_TYPES, require_native_kernels

PAGE_TOKENS, PAGES, SLOTS = 8, 25, 4
CAPACITY = PAGE_TOKENS * PAGES
# (slot, first position, rows) of the sequences of a step.
BATCHES = {
    "decoding": ((2, 130, 1), (0, 63, 1), (1, 4, 1), (3, 0, 1)),
    "prefill": ((1, 30, 90),),
    "both": ((0, 5, 40), (2, 199, 1), (3, 0, 20)),
}
both = pytest.mark.parametrize("choose", [choose_tokens, choose_tokens_twin])


def scene(
    batch: str, heads: int, dim: int, type: CacheType = CacheType.FLOAT32
) -> tuple[Tensor, Tensor, LayerPages, AttentionPlan, AttentionPlan]:
    """Queries, weights of heads, pages of keys, their plan, and that of another group; pages are in
    random order."""
    draw = torch.Generator().manual_seed(heads * dim)
    tables = [
        torch.randperm(SLOTS * PAGES, generator=draw).view(SLOTS, PAGES).int() for _ in range(2)
    ]
    spans, slots, ends = [], [], []
    for slot, start, rows in BATCHES[batch]:
        spans.append(RowSpan(len(slots), len(slots) + rows, slot, start))
        slots += [slot] * rows
        ends += range(start + 1, start + rows + 1)
    visible_end = torch.tensor(ends, dtype=torch.int32)
    plan = AttentionPlan(
        tables[0], torch.tensor(slots, dtype=torch.int32), torch.zeros_like(visible_end),
        visible_end, torch.zeros(len(slots), dtype=torch.int64), tuple(spans),
    )  # fmt: skip
    keys = torch.randn(SLOTS * PAGES, PAGE_TOKENS, 1, dim, generator=draw)
    stored = encode_rows(keys, type)
    quantized = QuantizedRows(type, dim, 0) if type.quantized else None
    pages = LayerPages(stored, stored[..., :0], 0, quantized, values_in_keys=True)
    queries = torch.randn(len(slots), heads, dim, generator=draw)
    weights = torch.randn(len(slots), heads, generator=draw)
    return queries, weights, pages, plan, replace(plan, page_table=tables[1])


def cells_of(plan: AttentionPlan) -> list[list[int]]:
    """Those that each row sees."""
    assert plan.row_slot.tolist() == list(range(len(plan.row_slot)))
    assert not plan.visible_begin.any() and plan.form is RowForm.ONE_EACH
    counts = plan.visible_end.tolist()
    return [row[:count] for row, count in zip(plan.page_table.tolist(), counts, strict=True)]


@both
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_see_the_positions_with_the_highest_scores(choose, batch: str) -> None:
    queries, weights, pages, plan, attended = scene(batch, 5, 24)
    found = cells_of(choose(queries, weights, pages, plan, attended, Budget(7)))
    keys = decode_rows(pages.keys, pages.type, 24).double()
    for row, cells in enumerate(found):
        slot, seen = plan.row_slot[row], int(plan.visible_end[row])
        own = keys[plan.page_table[slot].long()].view(-1, 24)[:seen]
        scores = (own @ queries[row].double().T).relu() @ weights[row].double()
        best = sorted(scores.topk(min(7, seen)).indices.tolist())
        table = attended.page_table[slot]
        assert cells == [int(table[p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS for p in best]


@pytest.mark.parametrize("type", NATIVE_TYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "dim", "most"), [(8, 64, 20), (3, 40, 1), (64, 128, 64)])
def test_choices_are_those_of_the_twin(batch, type: CacheType, heads: int, dim: int, most: int):
    require_native_kernels()
    inputs = scene(batch, heads, dim, type)
    found, expected = (
        choose(*inputs, Budget(most)) for choose in (choose_tokens, choose_tokens_twin)
    )
    assert torch.equal(found.page_table, expected.page_table)
    assert torch.equal(found.visible_end, expected.visible_end)


@both
def test_of_equal_scores_the_first_positions_are_chosen(choose) -> None:
    """Without positive products, all scores are equal, some of them as minus zero."""
    queries, weights, pages, plan, attended = scene("decoding", 2, 16)
    pages.keys.abs_()
    attended = plan
    found = cells_of(choose(-queries.abs(), weights, pages, plan, attended, Budget(9)))
    for row, cells in enumerate(found):
        table = plan.page_table[plan.row_slot[row]].tolist()
        count = min(9, int(plan.visible_end[row]))
        first = [table[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(count)]
        assert cells == first


@both
@pytest.mark.parametrize("block", [1, 4])
def test_scores_that_are_not_numbers_are_the_highest(choose, block: int) -> None:
    """So that what follows from them is not a number either, and is noticed."""
    queries, weights, pages, plan, _ = scene("both", 8, 64)
    table = plan.page_table[2].long()
    of_positions = table.repeat_interleave(PAGE_TOKENS) * PAGE_TOKENS
    of_positions += torch.arange(len(of_positions)) % PAGE_TOKENS
    positions = torch.tensor([3, 150])
    pages.cells.keys[of_positions[positions]] = torch.nan
    found = cells_of(choose(queries, weights, pages, plan, plan, Budget(2, block)))
    first = positions // block * block
    expected = torch.cat([of_positions[begin : begin + block] for begin in first.tolist()])
    assert found[40] == expected.tolist()


@both
def test_rows_that_see_fewer_positions_or_none_see_all_of_them(choose) -> None:
    queries, weights, pages, plan, attended = scene("decoding", 2, 16)
    plan.visible_end[1] = 0
    found = choose(queries, weights, pages, plan, attended, Budget(CAPACITY + 1))
    assert found.page_table.shape == (4, CAPACITY)
    assert found.visible_end.tolist() == [131, 0, 5, 1]


def test_choices_of_a_row_do_not_depend_on_the_others() -> None:
    require_native_kernels()
    queries, weights, pages, plan, attended = scene("prefill", 8, 64)
    whole = cells_of(choose_tokens(queries, weights, pages, plan, attended, Budget(20)))
    for row in (0, 7, 89):
        own = slice(row, row + 1)
        alone = replace(
            plan,
            row_slot=plan.row_slot[own],
            visible_begin=plan.visible_begin[own],
            visible_end=plan.visible_end[own],
        )
        chosen = choose_tokens(queries[own], weights[own], pages, alone, attended, Budget(20))
        assert cells_of(chosen) == [whole[row]]


@pytest.mark.parametrize("values_in_keys", [False, True])
def test_attention_to_all_chosen_tokens_has_the_bits_of_attention_to_all(values_in_keys) -> None:
    """So that a step may attend by either plan."""
    require_native_kernels()
    queries, weights, pages, plan, _ = scene("both", 4, 64)
    values = pages.keys[..., :32]
    attended = replace(pages, values=values, values_in_keys=True)
    if not values_in_keys:
        attended = replace(pages, values=values.contiguous(), values_in_keys=False)
    chosen = choose_tokens(queries, weights, pages, plan, plan, Budget(CAPACITY))
    scoring = Scoring(0.2)
    assert torch.equal(
        paged_attention(queries, attended.cells, chosen, scoring),
        paged_attention(queries, attended, plan, scoring),
    )


def test_the_host_knows_when_rows_see_few_positions() -> None:
    _, _, pages, plan, _ = scene("prefill", 1, 16)
    in_graph = replace(plan, form=RowForm.ONE_SPAN, spans=())
    assert sees_few(plan, pages, 120) and not sees_few(plan, pages, 119)
    assert sees_few(in_graph, pages, CAPACITY) and not sees_few(in_graph, pages, CAPACITY - 1)


BLOCKS = {
    "one local block": (3, Budget(2, 3, 1)),
    "blocks of more than a page": (2, Budget(3, 12, 2)),
    "no local block": (5, Budget(4, 16)),
    "single tokens": (1, Budget(6, 1, 2)),
}


@both
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_each_head_sees_the_blocks_with_the_highest_products(choose, batch, blocks: str) -> None:
    heads, budget = BLOCKS[blocks]
    queries, _, pages, plan, attended = scene(batch, heads, 24)
    found = cells_of(choose(queries, None, pages, plan, attended, budget))
    keys = decode_rows(pages.keys, pages.type, 24).double()
    for row in range(len(queries)):
        slot, seen = plan.row_slot[row], int(plan.visible_end[row])
        own = keys[plan.page_table[slot].long()].view(-1, 24)[:seen]
        table = attended.page_table[slot]
        for head in range(heads):
            scores = [
                part.max() for part in (own @ queries[row, head].double()).split(budget.block)
            ]
            scores[max(0, len(scores) - budget.local) :] = [torch.inf] * min(
                budget.local, len(scores)
            )
            best = torch.tensor(scores).topk(min(budget.most, len(scores))).indices.tolist()
            chosen = [p for p in range(seen) if p // budget.block in best]
            cells = [int(table[p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS for p in chosen]
            assert found[row * heads + head] == [cell * heads + head for cell in cells]


@pytest.mark.parametrize("type", NATIVE_TYPES)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_choices_of_blocks_are_those_of_the_twin(type: CacheType, blocks: str) -> None:
    require_native_kernels()
    heads, budget = BLOCKS[blocks]
    queries, _, *places = scene("both", heads, 64, type)
    inputs = queries, None, *places, budget
    found, expected = choose_tokens(*inputs), choose_tokens_twin(*inputs)
    assert torch.equal(found.page_table, expected.page_table)
    assert torch.equal(found.visible_end, expected.visible_end)


def test_attention_to_all_blocks_of_each_head_has_the_bits_of_attention_to_all() -> None:
    require_native_kernels()
    queries, _, pages, plan, _ = scene("both", 2, 64)
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(*pages.keys.shape[:2], 2, 64, generator=draw) for _ in range(2))
    attended = LayerPages(keys, values, 0)
    chosen = choose_tokens(queries, None, pages, plan, plan, Budget(CAPACITY, 4, 1))
    rows = torch.randn(len(queries), 6, 64, generator=draw)
    found = paged_attention(rows.view(-1, 3, 64), attended.cells, chosen, Scoring(0.2))
    expected = paged_attention(rows, attended, plan, Scoring(0.2))
    assert torch.equal(found.view_as(expected), expected)
