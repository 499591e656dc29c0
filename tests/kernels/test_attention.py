"""Paged attention: the twin against plain softmax attention, the fast path against the twin."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from runtime.engine.request import ImageSpan
from runtime.kernels import attention as room
from runtime.kernels.attention import Distances, Scoring, paged_attention, paged_attention_twin
from runtime.kernels.cache_rows import decode_rows, encode_rows
from runtime.kv.cache_kinds import CacheKind, Chunked, Full, Sliding, Symmetric
from runtime.kv.cache_types import CacheType
from runtime.worker.model import AttentionPlan, LayerPages, QuantizedRows, RowSpan
from tests.kernels.native_kernels import NATIVE_TYPES, require_native_kernels

SCALE = 0.2
# Scores reach about 8 here, so that a cap of 3 bends most of them.
OPTIONS = {
    "plain": (None, False),
    "capped": (3.0, False),
    "sinks": (None, True),
    "capped, sinks": (3.0, True),
}
every_option = pytest.mark.parametrize("options", OPTIONS)
# Every option, with windows from one row to none.
VISIBLE = (
    ("plain", None),
    ("plain", 1),
    ("capped", 20),
    ("sinks", 64),
    ("capped, sinks", None),
    ("capped, sinks", 20),
)
every_view = pytest.mark.parametrize(("options", "window"), VISIBLE)
# (slot, start, rows) per sequence: prefill, decode, and both in one batch.
BATCHES = {
    "one decoding row": ((0, 0, 1),),
    "decoding": ((2, 130, 1), (0, 63, 1), (1, 64, 1), (3, 0, 1)),
    "decoding far away": ((1, 1600, 1),),
    "prefill": ((1, 0, 100),),
    "prefill and decode": ((0, 5, 70), (2, 129, 1), (1, 1040, 1), (3, 0, 90), (4, 510, 5)),
}
# heads, kv heads, key and value dimensions, page size
SHAPES = {
    "every head its own": (5, 5, 128, 128, 32),
    "four share": (8, 2, 64, 64, 16),
    "three share, odd sizes": (6, 2, 80, 72, 7),
    "all share, tiny": (71, 1, 10, 18, 3),
}


def scene(
    batch: str, shape: str, *, window: int | None = None, type: CacheType = CacheType.FLOAT32
) -> tuple[Tensor, LayerPages, AttentionPlan]:
    """Queries, pages and plan. Entries that no row sees are NaN; pages are in random order.

    Tests share them, so that none may write to them.
    """
    queries, pages, plan = unlimited_scene(batch, shape, type)
    if window is not None:
        plan = replace(plan, visible_begin=(plan.visible_end - window).clamp(min=0))
    return queries, pages, plan


@lru_cache(maxsize=8)
def unlimited_scene(
    batch: str, shape: str, type: CacheType
) -> tuple[Tensor, LayerPages, AttentionPlan]:
    heads, kv_heads, key_dim, value_dim, page_tokens = SHAPES[shape]
    draw = torch.Generator().manual_seed(len(batch) + len(shape))
    per_slot = -(-max(start + rows for _, start, rows in BATCHES[batch]) // page_tokens)
    table = torch.randperm(5 * per_slot, generator=draw).view(5, per_slot).int()
    cells = (5 * per_slot, page_tokens, kv_heads)
    keys, values = (torch.full((*cells, dim), torch.nan) for dim in (key_dim, value_dim))
    slots, ends, writes, spans = [], [], [], []
    for slot, start, rows in BATCHES[batch]:
        spans.append(RowSpan(len(slots), len(slots) + rows, slot, start))
        for position in range(start + rows):
            page, offset = int(table[slot, position // page_tokens]), position % page_tokens
            keys[page, offset] = torch.randn(kv_heads, key_dim, generator=draw)
            values[page, offset] = torch.randn(kv_heads, value_dim, generator=draw)
            if position >= start:
                slots.append(slot)
                ends.append(position + 1)
                writes.append(page * page_tokens + offset)
    visible_end = torch.tensor(ends, dtype=torch.int32)
    plan = AttentionPlan(
        table, torch.tensor(slots, dtype=torch.int32), torch.zeros_like(visible_end), visible_end,
        torch.tensor(writes), tuple(spans),
    )  # fmt: skip
    queries = torch.randn(len(slots), heads, key_dim, generator=draw)
    return queries, stored_as(type, keys, values), plan


def stored_as(type: CacheType, keys: Tensor, values: Tensor) -> LayerPages:
    quantized = None
    if type.quantized:
        quantized = QuantizedRows(type, keys.shape[-1], values.shape[-1])
    return LayerPages(encode_rows(keys, type), encode_rows(values, type), 0, quantized)


def in_keys(pages: LayerPages, value_dim: int) -> tuple[LayerPages, LayerPages]:
    """The same keys, with their first `value_dim` elements as values: in place, and apart."""
    type, key_dim = pages.type, pages.dims[0]
    quantized = QuantizedRows(type, key_dim, value_dim) if type.quantized else None
    values = pages.keys[..., : type.width(value_dim)]
    inside = LayerPages(pages.keys, values, 0, quantized, values_in_keys=True)
    return inside, LayerPages(pages.keys, values.contiguous(), 0, quantized)


def options_of(name: str, heads: int) -> Scoring:
    """Some sinks are larger than all scores of a row."""
    softcap, with_sinks = OPTIONS[name]
    sinks = torch.linspace(-9, 9, heads) if with_sinks else None
    return Scoring(SCALE, softcap, sinks)


def seen_both_ways(queries: Tensor, plan: AttentionPlan) -> tuple[AttentionPlan, Distances]:
    """Rows that see their whole span and what precedes it, and scores that fall with distance."""
    end, positions = plan.visible_end.clone(), torch.empty(len(queries), dtype=torch.int64)
    for span in plan.spans:
        rows = span.end - span.begin
        end[span.begin : span.end] = span.start + rows
        positions[span.begin : span.end] = span.start + torch.arange(rows)
    slopes = torch.linspace(0.01, 0.5, queries.shape[1])
    return replace(plan, visible_end=end), Distances(slopes, positions)


def by_definition(
    queries: Tensor, pages: LayerPages, plan: AttentionPlan, scoring: Scoring
) -> Tensor:
    """Row by row, in float64."""
    softcap, sinks, distances = scoring.softcap, scoring.sinks, scoring.distances
    page_tokens, kv_heads = pages.values.shape[1:3]
    value_dim = pages.dims[1]
    all_keys, all_values = (
        decode_rows(stored, pages.type, dim).flatten(0, 1).double()
        for stored, dim in zip((pages.keys, pages.values), pages.dims, strict=True)
    )
    group = queries.shape[1] // kv_heads
    result = torch.zeros(*queries.shape[:2], value_dim, dtype=torch.float64)
    for row in range(len(queries)):
        seen = range(int(plan.visible_begin[row]), int(plan.visible_end[row]))
        table = plan.page_table[plan.row_slot[row]].tolist()
        where = [table[p // page_tokens] * page_tokens + p % page_tokens for p in seen]
        keys = all_keys[where].repeat_interleave(group, dim=1)
        values = all_values[where].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,phd->hp", queries[row].double(), keys) * scoring.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if distances is not None:
            apart = (torch.tensor(seen) - distances.positions[row]).abs()
            scores = scores - distances.slopes[:, None].double() * apart
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        weights = scores.softmax(dim=1)[:, : len(where)]
        result[row] = torch.einsum("hp,phd->hd", weights, values)
    return result


def rows_of(plan: AttentionPlan, begin: int, end: int) -> AttentionPlan:
    """The plan of some rows of one sequence."""
    spans = [
        s._replace(begin=0, end=end - begin, start=s.start + begin - s.begin)
        for s in plan.spans
        if s.begin <= begin and end <= s.end
    ]
    return AttentionPlan(
        plan.page_table, plan.row_slot[begin:end], plan.visible_begin[begin:end],
        plan.visible_end[begin:end], plan.write_cell[begin:end], tuple(spans),
    )  # fmt: skip


@every_view
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_twin_is_softmax_attention(
    batch: str, shape: str, window: int | None, options: str
) -> None:
    queries, pages, plan = scene(batch, shape, window=window)
    chosen = options_of(options, queries.shape[1])
    got = paged_attention_twin(queries, pages, plan, chosen)
    expected = by_definition(queries, pages, plan, chosen).float()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ["plain", "capped, sinks"])
@pytest.mark.parametrize("shape", ["four share", "three share, odd sizes"])
def test_scores_fall_with_distance(shape: str, options: str) -> None:
    require_native_kernels()
    queries, pages, plan = scene("prefill and decode", shape)
    plan, distances = seen_both_ways(queries, plan)
    chosen = replace(options_of(options, queries.shape[1]), distances=distances)
    expected = by_definition(queries, pages, plan, chosen).float()
    for attention in (paged_attention, paged_attention_twin):
        got = attention(queries, pages, plan, chosen)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    several = next(span for span in plan.spans if span.end - span.begin > 1)
    some = slice(several.begin, several.begin + 3)
    apart = replace(distances, positions=distances.positions[some])
    alone = rows_of(plan, some.start, some.stop)
    whole = paged_attention(queries, pages, plan, chosen)
    chosen = replace(chosen, distances=apart)
    assert torch.equal(paged_attention(queries[some], pages, alone, chosen), whole[some])


def test_the_twin_gives_the_same_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, pages, plan = scene("prefill and decode", "four share")
    chosen = options_of("capped, sinks", queries.shape[1])
    whole = paged_attention_twin(queries, pages, plan, chosen)
    monkeypatch.setattr(room, "TWIN_ELEMENTS", 5000)
    pieces = paged_attention_twin(queries, pages, plan, chosen)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("type", "options", "window"),
    [
        *((CacheType.FLOAT32, *view) for view in VISIBLE),
        *((type, *view) for type in NATIVE_TYPES[1:] for view in (VISIBLE[0], VISIBLE[-1])),
    ],
)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fast_path_agrees_with_the_twin(
    batch: str, shape: str, window: int | None, type: CacheType, options: str
) -> None:
    require_native_kernels()
    queries, pages, plan = scene(batch, shape, window=window, type=type)
    chosen = options_of(options, queries.shape[1])
    got = paged_attention(queries, pages, plan, chosen)
    expected = paged_attention_twin(queries, pages, plan, chosen)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [paged_attention, paged_attention_twin])
@pytest.mark.parametrize(
    "kind", [Full(), Sliding(1), Sliding(33), Symmetric(20), Chunked(33)], ids=str
)
def test_rows_see_what_their_cache_kind_says(attention, kind: CacheKind) -> None:
    """Compared with attention to all positions under a mask over pairs of positions."""
    queries, pages, plan = scene("prefill", "four share")
    position = torch.arange(100)
    whole = ImageSpan(0, 100, whole=True, digest=b"")
    seen = kind.seen(0, 100, (whole,) if isinstance(kind, Symmetric) else ())
    begin, end = (torch.tensor(part, dtype=torch.int32) for part in seen)
    plan = replace(plan, visible_begin=begin, visible_end=end)
    got = attention(queries, pages, plan, Scoring(SCALE))
    behind = position[:, None] - position
    visible = behind >= 0
    if isinstance(kind, Symmetric):
        visible = behind.abs() <= kind.distance
    if isinstance(kind, Sliding):
        visible &= behind < kind.window
    if isinstance(kind, Chunked):
        visible &= position[:, None] // kind.chunk == position // kind.chunk
    cells = plan.write_cell
    keys, values = (part.flatten(0, 1)[cells] for part in (pages.keys, pages.values))
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,phd->hqp", queries, keys) * SCALE
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    expected = torch.einsum("hqp,phd->qhd", weights, values)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "window, options, type",
    [
        (None, "plain", CacheType.FLOAT32),
        (20, "plain", CacheType.FLOAT16),
        (None, "sinks", CacheType.Q8_0),
        (20, "capped, sinks", CacheType.Q4_0),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    shape: str, window: int | None, options: str, type: CacheType
) -> None:
    """Alone, several threads compute parts of what a row sees; together, each computes a tile."""
    require_native_kernels()
    queries, pages, plan = scene("prefill and decode", shape, window=window, type=type)
    chosen = options_of(options, queries.shape[1])
    together = paged_attention(queries, pages, plan, chosen)
    for span in plan.spans:
        for rows in (1, 2, 3, 64):
            for begin in range(span.begin, span.end - rows + 1, rows):
                some = rows_of(plan, begin, begin + rows)
                apart = paged_attention(queries[begin : begin + rows], pages, some, chosen)
                assert torch.equal(apart, together[begin : begin + rows]), (begin, rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_do_not_depend_on_the_number_of_threads(shape: str) -> None:
    """A single thread computes whole tiles, several ones the parts of a long row."""
    require_native_kernels()
    queries, pages, plan = scene("decoding far away", shape, type=CacheType.FLOAT16)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(paged_attention(queries, pages, plan, Scoring(SCALE)))
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("attention", [paged_attention, paged_attention_twin])
@every_option
def test_rows_may_see_forward_within_an_image_and_nothing_at_all(attention, options: str) -> None:
    queries, pages, plan = scene("prefill", "four share")
    end = plan.visible_end.clone()
    end[20:40] = 40  # an image: its rows see each other in both directions
    begin = plan.visible_begin.clone()
    begin[50], begin[60] = end[50], 90  # one row sees nothing, another less than nothing
    plan = replace(plan, visible_begin=begin, visible_end=end)
    chosen = options_of(options, queries.shape[1])
    got = attention(queries, pages, plan, chosen)
    expected = by_definition(queries, pages, plan, chosen).float()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not got[50].any() and not got[60].any() and got[51].all()


@pytest.mark.parametrize("attention", [paged_attention, paged_attention_twin])
def test_large_scores_do_not_overflow(attention) -> None:
    queries, pages, plan = scene("decoding", "four share")
    got = attention(queries * 1000, pages, plan, Scoring(SCALE))
    expected = by_definition(queries * 1000, pages, plan, Scoring(SCALE)).float()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_the_result_has_the_type_of_the_queries() -> None:
    queries, pages, plan = scene("decoding", "four share")
    for attention in (paged_attention, paged_attention_twin):
        assert attention(queries.bfloat16(), pages, plan, Scoring(SCALE)).dtype == torch.bfloat16


def test_the_twin_is_used_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, pages, plan = scene("decoding", "four share")
    monkeypatch.setattr(room, "library", lambda: None)
    got = paged_attention(queries, pages, plan, Scoring(SCALE))
    assert torch.equal(got, paged_attention_twin(queries, pages, plan, Scoring(SCALE)))


@pytest.mark.parametrize("type", CacheType)
@pytest.mark.parametrize(
    ("shape", "value_dim"),
    [("every head its own", 64), ("four share", 32), ("three share, odd sizes", 40)],
)
@pytest.mark.parametrize("batch", ["decoding", "prefill and decode"])
def test_values_in_keys_are_read_as_values_apart(
    batch: str, shape: str, value_dim: int, type: CacheType
) -> None:
    queries, pages, plan = scene(batch, shape, type=type)
    inside, apart = in_keys(pages, value_dim)
    for attention in (paged_attention, paged_attention_twin):
        got = attention(queries, inside, plan, Scoring(SCALE))
        assert got.shape[2] == value_dim and got.any()
        assert torch.equal(got, attention(queries, apart, plan, Scoring(SCALE)))
