"""Paged attention and cache writes of CUDA devices in Triton's interpreter, against their twins."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.kernels import attention as dispatch
from runtime.kernels.activations import RoundedActivations
from runtime.kernels.attention import Scoring, paged_attention_twin, write_cache_twin
from runtime.kernels.triton import attention as kernels
from runtime.kernels.triton.attention import attended_rows, paged_attention
from runtime.kernels.triton.cache_write import write_cache
from runtime.kernels.triton.rounded import planes_of, rounded
from runtime.kv.cache_types import CacheType
from runtime.quant.weight import Compute
from runtime.worker.model import AttentionPlan, LayerPages, QuantizedRows, RowForm
from tests.cuda.attention_specimens import shape
from tests.kernels import test_attention as scenes
from tests.kernels.test_attention import SCALE, in_keys, options_of, rows_of, scene, seen_both_ways
from tests.kernels.test_cache_rows import numbers

# (batch, shape, window, options, parts), for every type of cache; shapes of both numbers of parts.
SCENES = {
    "decode": ("decoding", "three share, odd sizes", None, "plain", 1),
    "decode, narrow window, all options": ("decoding", "four share", 20, "capped, sinks", 4),
    "prefill": ("prefill", "four share", None, "sinks", 1),
    "mixed": ("short", "all share, tiny", 33, "capped", 1),
    "mixed in parts": ("short", "three share, odd sizes", None, "plain", 4),
}
# (slot, start, rows): short spans, which share a tile, and rows alone between them.
SHORT = ((0, 5, 3), (2, 40, 1), (1, 17, 2), (3, 0, 1), (4, 9, 7))
# The rows of one slot in spans of their own, as of proposed tokens.
PROPOSED = ((0, 5, 3), (3, 0, 1), (2, 40, 1), (2, 41, 1))


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What kernels leave unwritten is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def with_short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenes.BATCHES, "short", SHORT)
    monkeypatch.setitem(scenes.BATCHES, "proposed", PROPOSED)


@pytest.fixture
def with_shape(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes "given" a shape of a scene."""

    def make(*shape: int) -> None:
        monkeypatch.setitem(scenes.SHAPES, "given", shape)
        scenes.unlimited_scene.cache_clear()  # it knows shapes by their names

    return make


def occupy(
    monkeypatch: pytest.MonkeyPatch, programs: int, *, parts: int = 1, whole: int = 64
) -> None:
    """As if a device needed so many programs, and rows of more than `whole` positions `parts`."""
    monkeypatch.setattr(kernels, "LEAST_PARTS", parts)
    monkeypatch.setattr(kernels, "MOST_WHOLE", whole)
    monkeypatch.setattr(kernels, "PROGRAMS_EACH", programs)
    monkeypatch.setattr(kernels, "LEAST_PROGRAMS_EACH", programs)


def assert_as_the_twin(
    queries: Tensor, pages: LayerPages, plan: AttentionPlan, chosen: Scoring
) -> Tensor:
    got = paged_attention(queries, pages, plan, chosen)
    expected = paged_attention_twin(queries, pages, plan, chosen)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    return got


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("type", CacheType)
def test_attention_is_that_of_the_twin(
    name: str, type: CacheType, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, shape, window, options, parts = SCENES[name]
    occupy(monkeypatch, 1, parts=parts)
    queries, pages, plan = scene(batch, shape, window=window, type=type)
    assert_as_the_twin(queries, pages, plan, options_of(options, queries.shape[1]))


@pytest.mark.parametrize("batch", ["decoding", "prefill", "short"])
def test_scores_fall_with_distance(batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    occupy(monkeypatch, 1, parts=4)
    queries, pages, plan = scene(batch, "three share, odd sizes")
    plan, distances = seen_both_ways(queries, plan)
    chosen = options_of("capped, sinks", queries.shape[1])
    assert_as_the_twin(queries, pages, plan, replace(chosen, distances=distances))


@pytest.mark.parametrize("dims", [(96, 96), (192, 128), (256, 256), (576, 512)], ids=str)
@pytest.mark.parametrize("batch", ["decoding", "short"])
def test_heads_may_be_large(dims: tuple[int, int], batch: str, with_shape) -> None:
    with_shape(2, 1, *dims, 16)
    queries, pages, plan = scene(batch, "given", type=CacheType.FLOAT16)
    assert_as_the_twin(queries, pages, plan, Scoring(0.05))


@pytest.mark.parametrize(
    ("type", "dims"),
    [
        *((type, (80, 40)) for type in CacheType),
        *(
            (type, dims)
            for type in (CacheType.FLOAT16, CacheType.Q4_0)
            for dims in ((24, 16), (96, 64))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", ["decoding", "short"])
def test_values_may_be_in_keys(batch: str, dims: tuple[int, int], type: CacheType, with_shape):
    with_shape(2, 1, dims[0], dims[0], 16)
    queries, pages, plan = scene(batch, "given", type=type)
    inside, apart = in_keys(pages, dims[1])
    got = assert_as_the_twin(queries, inside, plan, Scoring(SCALE))
    assert torch.equal(got, paged_attention(queries, apart, plan, Scoring(SCALE)))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("type", [CacheType.Q8_0, CacheType.Q4_0], ids=str)
def test_blocks_may_be_dequantised_half_by_half(
    type: CacheType, dim: int, capability: tuple[int, int], with_shape, monkeypatch
) -> None:
    monkeypatch.setattr(kernels, "capability", lambda device: capability)
    with_shape(2, 1, dim, dim, 16)
    queries, pages, plan = scene("short", "given", type=type)
    assert_as_the_twin(queries, pages, plan, Scoring(0.05))


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_a_long_row_is_divided_into_the_same_splits_by_any_number_of_programs(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LEAST_SPLIT", 64)
    queries, pages, plan = scene("decoding far away", "four share")
    chosen = options_of("sinks", queries.shape[1])
    occupy(monkeypatch, 1)
    whole = assert_as_the_twin(queries, pages, plan, chosen)
    occupy(monkeypatch, 2 * parts)
    assert torch.equal(paged_attention(queries, pages, plan, chosen), whole)
    occupy(monkeypatch, 1, parts=parts, whole=1600)
    assert torch.equal(paged_attention(queries, pages, plan, chosen), whole)


@pytest.mark.parametrize("processors", [58, 108, 128, 132])  # L4, A100, RTX 4090, H100
@pytest.mark.parametrize("rows", [1, 15, 33, 64, 150, 256])
def test_no_program_computes_a_long_row_alone(rows: int, processors: int) -> None:
    """All others of a decode step would wait for it."""
    for each in (
        shape(32, 8, 128), shape(8, 1, 512), shape(16, 16, 192, 128), shape(64, 8, 64)
    ):  # fmt: skip
        division = each.division(rows, processors)
        assert 2 < division.parts <= each.splits
        assert division.most_whole in (0, kernels.MOST_WHOLE)
        programs = rows * division.parts * each.tiles
        assert division.parts == each.splits or programs >= 2 * processors


def test_the_states_of_parts_are_bounded() -> None:
    latent = shape(128, 1, 576, 512)
    for rows in (1, 64, 80, 256, 257, 4096):
        least = 4 * rows * latent.heads * latent.splits * (latent.value_dim + 2)
        assert latent.division(rows, 132).parts == 1 or least <= kernels.MOST_STATE_BYTES
    assert latent.division(64, 132).parts > 1 and latent.division(256, 132).parts == 1


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN)")
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, Compute.FAST), (torch.float16, Compute.FINE)],
    ids=["float32, fast", "float16, fine"],
)
@pytest.mark.parametrize("dims", [(64, 64), (192, 96), (576, 512)], ids=str)
def test_merged_rows_are_rounded_to_the_bits_of_a_launch_of_its_own(
    dims: tuple[int, int], dtype: torch.dtype, rounding: Compute, with_shape, monkeypatch
) -> None:
    """Also one that is not finite."""
    with_shape(4, 2, *dims, 16)
    queries, pages, plan = scene("decoding", "given", type=CacheType.FLOAT16)
    queries = queries.to(dtype, copy=True)
    queries[1, 1, 0] = torch.nan
    options = Scoring(0.05, sinks=torch.linspace(-1.0, 2.0, 4))
    expected = paged_attention(queries, pages, plan, options).flatten(1)
    rows = {"deterministic": False, "rounding": rounding}
    occupy(monkeypatch, 1)
    assert isinstance(attended_rows(queries, pages, plan, options, **rows), Tensor)
    occupy(monkeypatch, 64)
    got = attended_rows(queries, pages, plan, options, **rows)
    assert isinstance(got, RoundedActivations)
    torch.testing.assert_close(got.x, expected, rtol=0, atol=0, equal_nan=True)
    integers = rounded(expected, planes_of(rounding))
    torch.testing.assert_close(got.rounded.scales, integers.scales, rtol=0, atol=0, equal_nan=True)
    finite = integers.scales.isfinite()  # integers beside a scale that is NaN are any
    assert not finite.all() and finite.any()
    assert torch.equal(got.rounded.sums[finite], integers.sums[finite])
    assert torch.equal(got.rounded.planes[:, :, finite], integers.planes[:, :, finite])


@pytest.mark.parametrize("value_dim, rows", [(80, 4), (64, 9)])
def test_other_heads_and_more_rows_are_not_rounded(
    value_dim: int, rows: int, with_shape, monkeypatch
) -> None:
    occupy(monkeypatch, 640)
    monkeypatch.setitem(scenes.BATCHES, "rows", tuple((row % 5, 20, 1) for row in range(rows)))
    with_shape(4, 2, 64, value_dim, 16)
    queries, pages, plan = scene("rows", "given", type=CacheType.FLOAT16)
    got = attended_rows(
        queries, pages, plan, Scoring(SCALE), deterministic=False, rounding=Compute.FINE
    )
    assert torch.equal(got, paged_attention(queries, pages, plan, Scoring(SCALE)).flatten(1))


@pytest.mark.parametrize("type", [CacheType.FLOAT32, CacheType.Q4_0], ids=str)
def test_the_bits_of_a_decoding_row_do_not_depend_on_other_rows(
    type: CacheType, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupy(monkeypatch, 10)
    queries, pages, plan = scene("short", "three share, odd sizes", type=type)
    together = paged_attention(queries, pages, plan, Scoring(SCALE))
    for span in plan.spans:
        if span.end - span.begin == 1:
            one = rows_of(plan, span.begin, span.end)
            apart = paged_attention(queries[span.begin : span.end], pages, one, Scoring(SCALE))
            assert torch.equal(apart[0], together[span.begin])


def test_the_bits_of_a_prefilled_row_do_not_depend_on_other_rows(with_shape) -> None:
    """At the same place of a tile, for numpy's sake."""
    with_shape(6, 2, 64, 64, 16)
    queries, pages, plan = scene("prefill", "given", window=33)
    together = paged_attention(queries, pages, plan, Scoring(SCALE))
    for begin, end in ((0, 2), (42, 50), (84, 100)):
        apart = paged_attention(
            queries[begin:end], pages, rows_of(plan, begin, end), Scoring(SCALE)
        )
        assert torch.equal(apart, together[begin:end])


@pytest.mark.parametrize("batch", ["prefill", "decoding"])
@pytest.mark.parametrize("options", ["plain", "sinks"])
def test_a_row_may_see_nothing_and_rows_may_see_forward(batch: str, options: str) -> None:
    queries, pages, plan = scene(batch, "four share")
    begin, end = plan.visible_begin.clone(), plan.visible_end.clone()
    if batch == "prefill":
        end[20:40] = 40
        begin[50] = end[50]
    begin[1], end[1] = 90, 60
    plan = replace(plan, visible_begin=begin, visible_end=end)
    got = assert_as_the_twin(queries, pages, plan, options_of(options, queries.shape[1]))
    assert not got[1].any() and got[2].all()


def test_short_spans_and_single_rows_share_a_tile(with_shape) -> None:
    with_shape(4, 2, 64, 64, 16)
    queries, pages, plan = scene("short", "given")
    assert_as_the_twin(queries, pages, plan, Scoring(SCALE))


def test_adjacent_spans_of_one_slot_are_computed_beside_a_longer_one() -> None:
    assert_as_the_twin(*scene("proposed", "four share"), Scoring(SCALE))


def test_rows_of_one_span_may_have_padding_behind_them() -> None:
    """What follows from `RowForm.ONE_SPAN`, without spans on the host."""
    queries, pages, plan = scene("prefill", "four share", window=20)
    span = plan.spans[0]
    rows, padding = span.end, 3
    several = replace(rows_of(plan, 0, rows), spans=(span,))
    expected = paged_attention(queries[:rows], pages, several, Scoring(SCALE))

    def behind(of: Tensor, value: int) -> Tensor:
        return torch.cat([of[:rows], of.new_full((padding, *of.shape[1:]), value)])

    padded = replace(
        several,
        row_slot=behind(plan.row_slot, len(plan.page_table) - 1),
        visible_begin=behind(plan.visible_begin, 0),
        visible_end=behind(plan.visible_end, 0),
        spans=(),
        form=RowForm.ONE_SPAN,
    )
    got = paged_attention(behind(queries, 1), pages, padded, Scoring(SCALE))
    assert torch.equal(got[:rows], expected) and not got[rows:].any()


def test_queries_need_not_be_contiguous() -> None:
    queries, pages, plan = scene("decoding", "four share")
    wide = torch.cat([queries, torch.full_like(queries, torch.nan)], dim=2)
    for strided in (wide[:, :, : queries.shape[2]], queries.transpose(1, 2).contiguous().mT):
        assert_as_the_twin(strided, pages, plan, Scoring(SCALE))


def test_16_bit_queries_give_16_bit_results() -> None:
    queries, pages, plan = scene("short", "four share", type=CacheType.FLOAT16)
    got = paged_attention(queries.half(), pages, plan, Scoring(SCALE))
    expected = paged_attention_twin(queries.half(), pages, plan, Scoring(SCALE))
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=2e-3)


def test_impossible_arguments_are_refused() -> None:
    queries, pages, plan = scene("decoding", "four share")
    with pytest.raises(ValueError, match="7 query heads"):
        paged_attention(queries[:, :7], pages, plan, Scoring(SCALE))
    with pytest.raises(ValueError, match="softcap is 0"):
        paged_attention(queries, pages, plan, Scoring(SCALE, softcap=0.0))


def empty_pages(type: CacheType, heads: int, dims: tuple[int, int]) -> LayerPages:
    keys, values = (torch.full((5, 7, heads, type.width(dim)), 77).to(type.dtype) for dim in dims)
    return LayerPages(keys, values, 0, QuantizedRows(type, *dims) if type.quantized else None)


@pytest.mark.parametrize("dims", [(128, 128), (80, 72), (10, 18)], ids=str)
@pytest.mark.parametrize("type", CacheType)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_are_those_of_the_twin(
    type: CacheType, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    heads, cells = 2, torch.randperm(35, generator=torch.Generator().manual_seed(1))[:9]
    keys, values = (numbers(9, heads, dim) for dim in dims)
    keys[3, 0, 5], keys[4, 0, 1], values[5, -1, -1] = torch.nan, torch.inf, -torch.inf
    wide = torch.cat([keys, values], dim=2).to(dtype)
    keys, values = wide.split(dims, dim=2)
    plan = AttentionPlan(*[torch.zeros(0)] * 4, cells, ())
    got, expected = empty_pages(type, heads, dims), empty_pages(type, heads, dims)
    write_cache(keys, values, got, plan)
    write_cache_twin(keys, values, expected, plan)
    for one, other in ((got.keys, expected.keys), (got.values, expected.values)):
        if type.quantized:
            one, other = _without_nan(one), _without_nan(other)
        # The interpreter truncates float32 to bfloat16.
        rounding = 2.0**-7 if type is CacheType.BFLOAT16 and dtype == torch.float32 else 0.0
        torch.testing.assert_close(one, other, rtol=rounding, atol=0, equal_nan=True)


@pytest.mark.parametrize("type", CacheType)
def test_keys_that_have_the_values_are_written_alone(type: CacheType) -> None:
    keys, cells = numbers(9, 2, 80), torch.randperm(35)[:9]
    plan = AttentionPlan(*[torch.zeros(0)] * 4, cells, ())
    got, expected = (in_keys(empty_pages(type, 2, (80, 80)), 40)[0] for _ in range(2))
    write_cache(keys, None, got, plan)
    write_cache_twin(keys, None, expected, plan)
    rounding = 2.0**-7 if type is CacheType.BFLOAT16 else 0.0  # as above
    torch.testing.assert_close(got.keys, expected.keys, rtol=rounding, atol=0)


def _without_nan(stored: Tensor) -> Tensor:
    """Scales that are NaN, of either sign, become 0."""
    halves = stored.view(torch.float16)
    return torch.where(halves.isnan(), 0.0, halves).view(torch.uint8)


def test_devices_with_kernels_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, pages, plan = scene("decoding", "four share")
    calls = []
    monkeypatch.setattr(dispatch, "library", lambda: None)
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "launch", lambda kernel, *_, **__: calls.append(kernel))
    monkeypatch.setattr("runtime.kernels.triton.cache_write.launch", kernels.launch)
    dispatch.paged_attention(queries, pages, plan, Scoring(SCALE))
    dispatch.write_cache(queries[:, :2], queries[:, :2], pages, plan)
    names = ["decode_kernel", "merge_kernel", "write_kernel"]
    assert [kernel.__name__ for kernel in calls] == names
