"""From plans to tensors: rows, what they attend to, pages, loads, and the order of draws."""

import dataclasses
import random
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engine.request import GenerationRequest, ImageSpan, SamplingParams, StopRules
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk, PageWrite, SlotLoad, StepPlan
from runtime.kv.cache_kinds import CacheKind, Chunked, Cross, Full, Sliding
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import KVPool
from runtime.vision.image_rows import FeatureRows, axes_of
from runtime.worker.input_preparer import DeviceInputs, InputPreparer, StepLimits
from runtime.worker.model import ImageWrite, RowForm, RowSpan
from runtime.worker.sampler import Sampler, SamplingPath

CPU = torch.device("cpu")
KINDS = (Full(), Sliding(6), Chunked(8))
SLOTS, STEP_TOKENS, CONTEXT, PAGE_TOKENS, VOCAB = 4, 32, 64, 4, 1000


@dataclass(frozen=True)
class Picture:
    digest: bytes


class AnyTokens:
    """A grammar that is its own matcher; only `free` matters."""

    free = 0

    def matcher(self) -> "AnyTokens":
        return self


def preparer_of(
    kinds: tuple[CacheKind, ...], *, position_axes: int = 1, **options: Any
) -> InputPreparer:
    layout = CacheLayout.of([LayerCache(kind, 1, 2, 2) for kind in kinds], page_tokens=PAGE_TOKENS)
    pool = KVPool(
        layout,
        pages=[20] * len(kinds),
        slots=SLOTS,
        pages_per_sequence=CONTEXT // PAGE_TOKENS,
        type=CacheType.FLOAT32,
        device=CPU,
    )
    sampler = Sampler(slots=SLOTS, context_tokens=CONTEXT, vocab_size=VOCAB, device=CPU)
    return InputPreparer(
        layout,
        pool,
        sampler,
        StepLimits(SLOTS, STEP_TOKENS, CONTEXT),
        device=CPU,
        position_axes=position_axes,
        **options,
    )


@pytest.fixture
def preparer() -> InputPreparer:
    return preparer_of(KINDS)


def chunk(
    slot: int,
    start: int,
    length: int,
    *,
    samples: bool = True,
    sampling: SamplingParams | None = None,
    spans: tuple[ImageSpan, ...] = (),
    images: bytes = b"",
    constrained: bool = False,
) -> Chunk:
    request = GenerationRequest(
        f"r{slot}",
        (1,) * CONTEXT,
        StopRules(9),
        sampling or SamplingParams(),
        spans,
        images=tuple(Picture(bytes([digest])) for digest in images),
        grammar=AnyTokens() if constrained else None,
    )
    sequence = Sequence(request, list(request.prompt), pending=int(samples))
    return Chunk(sequence, 0, slot, start, length, (1,) * length, False, samples)


def plan(*chunks: Chunk, writes=(), loads=()) -> StepPlan:
    return StepPlan(tuple(chunks), tuple(writes), tuple(loads))


def inputs_of(preparer: InputPreparer, step: StepPlan) -> DeviceInputs:
    return preparer.prepare(step).inputs


def test_rows_lie_flat_in_the_order_of_the_chunks(preparer):
    inputs = inputs_of(preparer, plan(chunk(2, 5, 3), chunk(0, 40, 1), chunk(3, 0, 2)))
    assert inputs.positions.tolist() == [5, 6, 7, 40, 0, 1]
    assert inputs.positions.dtype == torch.int64
    assert inputs.row_slot.tolist() == [2, 2, 2, 0, 3, 3]
    assert inputs.row_slot.dtype == torch.int32
    full, sliding, chunked = (group.seen.spans(inputs.rows) for group in inputs.groups)
    assert full == (
        RowSpan(0, 3, 2, 5, 0, 8),
        RowSpan(3, 4, 0, 40, 0, 41),
        RowSpan(4, 6, 3, 0, 0, 2),
    )
    assert [(span.seen_begin, span.seen_end) for span in sliding] == [(0, 8), (35, 41), (0, 2)]
    assert [(span.seen_begin, span.seen_end) for span in chunked] == [(0, 8), (40, 41), (0, 2)]


def test_decode_steps_have_their_inputs_at_the_same_places(preparer):
    places = []
    for penalty, scores, count in ((1.0, None, 2), (1.1, 3, 4), (1.0, 1, 4)):
        sampling = SamplingParams(repeat_penalty=penalty, logprobs=scores)
        inputs = inputs_of(
            preparer, plan(*(chunk(n, 9 + n, 1, sampling=sampling) for n in range(count)))
        )
        groups = (part for group in inputs.groups for part in (group.begin, group.end))
        parts = (inputs.positions, inputs.row_slot, *groups, inputs.output_rows)
        draws = (inputs.draws.slots, inputs.draws.positions)
        places.append([part.storage_offset() * part.itemsize for part in (*parts, *draws)])
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("axes", [1, 3])
def test_prompts_of_one_sequence_are_padded_at_the_same_places(axes: int) -> None:
    """Also if they do not sample; not with rows of another sequence, or with those of an image."""
    padded = {RowForm.ONE_EACH: 4, RowForm.ONE_SPAN: 16}
    preparer = preparer_of(
        KINDS, position_axes=axes, padded_rows=lambda form, count: padded[form], room=16
    )
    places = []
    for start, length, samples in ((0, 12, True), (30, 9, False)):
        inputs = inputs_of(preparer, plan(chunk(2, start, length, samples=samples)))
        assert inputs.form is RowForm.ONE_SPAN and not inputs.draws_alone
        assert inputs.positions.tolist() == [*range(start, start + length), *[0] * (16 - length)]
        assert inputs.row_slot.tolist() == [2] * length + [SLOTS] * (16 - length)
        assert inputs.output_rows.tolist() == [length - 1 if samples else 0]
        for kind, group in zip(KINDS, inputs.groups, strict=True):
            begins, ends = kind.seen(start, start + length)
            assert group.begin.tolist() == begins + [0] * (16 - length)
            assert group.end.tolist() == ends + [0] * (16 - length)
        parts = [part for group in inputs.groups for part in (group.begin, group.end)]
        parts += [inputs.positions, inputs.row_slot, inputs.output_rows]
        parts += [] if inputs.axes is None else [inputs.axes]
        places.append([part.storage_offset() * part.itemsize for part in parts])
    assert places[0] == places[1]
    picture = {"spans": (ImageSpan(4, 2, False, b"a", grid=(1, 2)),), "images": b"a"}
    for chunks in ((chunk(2, 0, 12), chunk(1, 5, 1)), (chunk(2, 0, 12, **picture),)):
        inputs = inputs_of(preparer, plan(*chunks))
        assert inputs.form is None and len(inputs.positions) == sum(c.length for c in chunks)


def flat(inputs: DeviceInputs) -> list[object]:
    """All values of the inputs of a step without images."""
    groups = [
        (group.begin.tolist(), group.end.tolist(), group.seen.spans(inputs.rows))
        for group in inputs.groups
    ]
    axes = None if inputs.axes is None else inputs.axes.tolist()
    rows = inputs.positions, inputs.row_slot, inputs.output_rows
    single = inputs.form, inputs.draws_alone
    found = [*(each.tolist() for each in rows), groups, axes, *single, inputs.drawing]
    return [*found, inputs.constrained, inputs.scored, inputs.pooled, repr(inputs.draws)]


PICTURES = (ImageSpan(1, 6, False, b"a", grid=(2, 3)), ImageSpan(9, 4, False, b"b", grid=(1, 4)))


def check_places(inputs: DeviceInputs, chunks: list[Chunk]) -> None:
    """Compare axes and seen indices with those of each chunk alone."""
    alone = [(each.start, each.start + each.length, each.sequence.spans) for each in chunks]
    for kind, group in zip(KINDS, inputs.groups, strict=True):
        begins, ends = zip(*(kind.seen(*each) for each in alone), strict=True)
        assert group.begin.tolist() == [*chain.from_iterable(begins)]
        assert group.end.tolist() == [*chain.from_iterable(ends)]
    if inputs.axes is not None:
        expected = np.concatenate(
            [axes_of(spans, *place, len(inputs.axes)) for *place, spans in alone], axis=1
        )
        assert inputs.axes.tolist() == expected.tolist()


@pytest.mark.parametrize("axes", [1, 3, 4])
def test_the_same_sequences_have_the_inputs_of_new_ones_at_their_positions(
    axes: int,
) -> None:
    """The inputs of a decode step are used again while its sequences stay in their slots."""
    draw, used = random.Random(5), preparer_of(KINDS, position_axes=axes)
    choices = (
        SamplingParams(temperature=0.0),
        SamplingParams(logprobs=2, logit_bias=((3, 1.0),)),
        SamplingParams(top_k=0),
        SamplingParams(repeat_penalty=1.1),
    )
    running: dict[int, Chunk] = {}
    repeated = 0
    for number in range(300):
        before = used._steps[0].decode
        if draw.random() < 0.2:
            slot = draw.randrange(SLOTS)
            sampling = choices[3 if draw.random() < 0.1 else draw.randrange(3)]
            running[slot] = chunk(
                slot,
                draw.randrange(20),
                1,
                sampling=sampling,
                constrained=draw.random() < 0.2,
                spans=PICTURES[: draw.randrange(3)],
            )
        if draw.random() < 0.1 and len(running) > 1:
            del running[draw.choice(list(running))]
        if draw.random() < 0.2:
            running = dict(sorted(running.items(), key=lambda _: draw.random()))
        chunks = [
            each._replace(
                start=draw.randrange(CONTEXT - 3),
                length=2 if draw.random() < 0.02 else 1,
                samples=draw.random() > 0.02,
            )
            for each in running.values()
        ]
        if not chunks:
            continue
        writes = [PageWrite(0, 1, number % 4, number)] if draw.random() < 0.3 else []
        step = plan(*chunks, writes=writes)
        changes, inputs = used.prepare(step)
        assert (changes.pages is not None) == bool(writes)
        if changes.pages is not None:
            assert changes.pages.pages.tolist() == [number]
        assert flat(inputs) == flat(inputs_of(preparer_of(KINDS, position_axes=axes), step))
        check_places(inputs, chunks)
        repeated += before is not None and used._steps[0].decode is before
    assert repeated > 50


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(top_k=0)},
        {"sampling": SamplingParams(logprobs=0)},
        {"sampling": SamplingParams(logit_bias=((3, 1.0),))},
        {"sampling": SamplingParams(presence_penalty=0.1)},
        {"sampling": SamplingParams(dry_multiplier=1.0)},
        {"sampling": SamplingParams(bad_words=((1,),))},
        {"sampling": SamplingParams(allowed=b"\x03")},
        {"sampling": SamplingParams(typical_p=0.5)},
        {"samples": False},
        {"constrained": True},
    ],
    ids=str,
)
def test_rows_draw_from_their_logits_alone_only_without_options(
    preparer: InputPreparer, options: dict[str, Any]
) -> None:
    plain = [chunk(0, 9, 1), chunk(1, 9, 1, sampling=SamplingParams(temperature=0.0))]
    assert inputs_of(preparer, plan(*plain)).draws_alone
    assert not inputs_of(preparer, plan(*plain, chunk(2, 5, 1, **options))).draws_alone
    assert not inputs_of(preparer, plan(plain[0], chunk(1, 5, 2))).draws_alone
    assert inputs_of(preparer, plan(*plain)).draws_alone


def test_each_row_sees_what_the_kind_of_its_group_allows(preparer):
    chunks = [chunk(0, 0, 9), chunk(1, 3, 11), chunk(2, 30, 1), chunk(3, 16, 8)]
    inputs = inputs_of(preparer, plan(*chunks))
    places = [c.start + i for c in chunks for i in range(c.length)]
    for place, expected in {0: [0, 0, 0], 9: [0, 4, 8], 13: [0, 8, 8], 30: [0, 25, 24]}.items():
        row = places.index(place)
        assert [group.begin[row].item() for group in inputs.groups] == expected
    for kind, group in zip(KINDS, inputs.groups, strict=True):
        assert group.begin.tolist() == [kind.first_visible(place) for place in places]
        assert group.end.tolist() == [place + 1 for place in places]
        assert group.begin.dtype == group.end.dtype == torch.int32


def test_rows_of_a_whole_image_see_its_end_and_other_rows_do_not(preparer):
    whole, split = ImageSpan(5, 4, True, b"a"), ImageSpan(12, 6, False, b"b")
    inputs = inputs_of(
        preparer, plan(chunk(0, 3, 11, spans=(whole, split)), chunk(1, 9, 4, spans=(whole, split)))
    )
    ends = [4, 5, 9, 9, 9, 9, 10, 11, 12, 13, 14, 10, 11, 12, 13]
    for group in inputs.groups:
        assert group.end.tolist() == ends


def test_outputs_are_the_last_rows_of_the_chunks_that_draw_ordered_by_path(preparer):
    sort = SamplingParams(top_k=0)
    greedy = SamplingParams(temperature=0.0)
    inputs = inputs_of(
        preparer,
        plan(
            chunk(0, 0, 4, sampling=sort),
            chunk(1, 7, 2, samples=False, sampling=greedy),
            chunk(2, 9, 1, sampling=greedy),
            chunk(3, 2, 3, sampling=SamplingParams(top_k=13)),
        ),
    )
    assert inputs.drawing == (2, 3, 0)
    assert inputs.output_rows.tolist() == [6, 9, 3]
    draws = inputs.draws
    assert draws.slots.tolist() == [2, 3, 0]
    assert draws.positions.tolist() == [10, 5, 4]
    counts = dict(zip(SamplingPath, draws.counts, strict=True))
    assert {path for path, count in counts.items() if count} == {
        SamplingPath.GREEDY,
        SamplingPath.TOP,
        SamplingPath.SORTED,
    }
    assert sum(draws.counts) == 3
    assert draws.width == 13


def test_only_rows_with_these_options_are_penalised_and_scored(preparer):
    greedy = SamplingParams(temperature=0.0)
    replace = dataclasses.replace
    inputs = inputs_of(
        preparer,
        plan(
            chunk(0, 20, 1, sampling=replace(greedy, repeat_penalty=1.1, repeat_last_n=9)),
            chunk(1, 20, 1, sampling=replace(greedy, logprobs=3)),
            chunk(2, 20, 1, sampling=replace(greedy, logprobs=0, repeat_last_n=None)),
            chunk(3, 12, 1, sampling=replace(greedy, presence_penalty=1, repeat_last_n=None)),
        ),
    )
    assert inputs.draws.penalised.rows.tolist() == [0, 3]
    assert (
        inputs.draws.penalised.window == 13
    )  # the whole sequence of slot 3, the longer of the two
    assert inputs.draws.scored.rows.tolist() == [1, 2]
    assert inputs.draws.scored.alternatives == 3


@pytest.mark.parametrize(("repeat_penalty", "window"), [(1.0, 3), (1.1, 23)])
def test_only_the_repeat_penalty_reads_tokens_before_counted_from(preparer, repeat_penalty, window):
    sampling = SamplingParams(
        presence_penalty=1, repeat_penalty=repeat_penalty, repeat_last_n=None, counted_from=20
    )
    inputs = inputs_of(preparer, plan(chunk(0, 22, 1, sampling=sampling)))
    assert inputs.draws.penalised.window == window


def test_a_plan_that_draws_nothing_has_no_outputs(preparer):
    inputs = inputs_of(preparer, plan(chunk(0, 0, 7, samples=False)))
    assert inputs.output_rows.shape == (0,) and inputs.drawing == ()
    assert sum(inputs.draws.counts) == 0


def test_page_writes_are_those_of_the_pool(preparer):
    writes = [PageWrite(0, 1, 3, 17), PageWrite(2, 3, 15, 19)]
    changes = preparer.prepare(plan(chunk(0, 0, 1), writes=writes)).changes
    cells = [preparer._pool.table_cell(w.group, w.slot, w.index) for w in writes]
    assert changes.pages.cells.tolist() == cells and changes.pages.cells.dtype == torch.int64
    assert changes.pages.pages.tolist() == [17, 19] and changes.pages.pages.dtype == torch.int32


@pytest.mark.parametrize("odd", [0, 1])  # 64-bit values after an odd number of 32-bit ones
def test_loads_carry_tokens_and_parameters_exactly(preparer, odd):
    sampling = SamplingParams(
        temperature=0.3, top_k=7, top_p=0.4, min_p=0.1, seed=2**63 - 3, repeat_last_n=5, dropped=6
    )
    everything = SamplingParams(
        top_k=0, seed=-9, repeat_last_n=None, typical_p=0.5, top_n_sigma=1.5, xtc_probability=0.25,
        xtc_threshold=0.2, dynatemp_range=0.75, dynatemp_exponent=2.0, dry_multiplier=0.5,
        dry_base=8.0, dry_allowed_length=3, dry_breakers=bytes([0, 0, 0, 128]),
        allowed=bytes([3, 0, 0, 128]), bad_words=((7, 8, 9), (6,)), words_from=4,
    )  # fmt: skip
    loads = [SlotLoad(1, tuple(range(900, 910 + odd)), sampling), SlotLoad(3, (7,), everything)]
    changes = preparer.prepare(plan(chunk(1, 9, 1), loads=loads)).changes
    assert changes.loads is not None
    tokens = [(slot, part.tolist()) for slot, part in changes.loads.tokens]
    assert tokens == [(1, list(range(900, 910 + odd))), (3, [7])]
    parameters, biases, chains, repetitions, restrictions = changes.loads.rows
    assert biases is None
    assert parameters.slots.tolist() == [1, 3]
    floats, ints = parameters.values
    expected = torch.tensor([0.3, 0.4, 0.1, 1.0, 0.0, 0.0])
    torch.testing.assert_close(floats[0], expected)
    assert ints.tolist() == [[2**63 - 3, 7, 5, 0, 6], [-9, VOCAB, CONTEXT, 0, 0]]
    for rows in (chains, repetitions, restrictions):
        assert rows is not None and rows.slots.tolist() == [3]
    floats, ints, breakers = repetitions.values
    assert floats.tolist() == [[0.5, 8.0]]
    assert ints.tolist() == [[3, CONTEXT, 42]]  # 8**42 is the largest float32
    assert breakers[0, :2].tolist() == [-(2**31), 0]
    begins, words, allowed = restrictions.values
    assert begins.tolist() == [4]
    assert words[0, :3, :4].tolist() == [[9, 8, 7, -1], [6, *[-1] * 3], [-1] * 4]
    assert allowed[0, :2].tolist() == [3 - 2**31, 0]
    torch.testing.assert_close(chains.values[0], torch.tensor([[1.5, 0.5, 0.25, 0.2, 0.75, 2.0]]))


@pytest.mark.parametrize("kinds", [KINDS, (Full(), Sliding(6), Cross(2, 30, alignment=8))])
def test_the_largest_plan_fits_into_the_buffers(kinds):
    preparer = preparer_of(kinds)
    layout = CacheLayout.of([LayerCache(kind, 1, 2, 2) for kind in kinds], page_tokens=PAGE_TOKENS)
    most = layout.held_pages(CONTEXT, STEP_TOKENS)
    writes = [
        PageWrite(g, s, i, 0) for g, pages in enumerate(most) for s in range(SLOTS)
        for i in range(pages)
    ]  # fmt: skip
    everything = SamplingParams(
        repeat_penalty=2.0, logprobs=20, typical_p=0.5, dry_multiplier=1.0, bad_words=((1,),)
    )
    loads = [SlotLoad(s, (1,) * CONTEXT, everything) for s in range(SLOTS)]
    chunks = [chunk(s, 0, STEP_TOKENS // SLOTS, sampling=everything) for s in range(1, SLOTS)]
    images = tuple(ImageSpan(n, 1, False, b"a", 30) for n in range(2))
    chunks.append(chunk(0, 0, STEP_TOKENS // SLOTS, sampling=everything, spans=images))
    inputs = inputs_of(preparer, plan(*chunks, writes=writes, loads=loads))
    assert inputs.positions.shape == (STEP_TOKENS,)


def test_rows_see_the_images_of_the_last_run_and_these_are_written_when_it_begins():
    preparer = preparer_of((Full(), Cross(4, 6, alignment=8)))
    spans = (
        ImageSpan(2, 1, False, b"a", 3),
        ImageSpan(3, 1, False, b"b", 4, 2),
        ImageSpan(6, 2, False, b"c", 5),
    )
    inputs = inputs_of(preparer, plan(chunk(1, 0, 5, spans=spans), chunk(3, 4, 5, spans=spans)))
    text, cross = inputs.groups
    assert text.images is None
    assert list(zip(cross.begin.tolist(), cross.end.tolist(), strict=True)) == [
        *((0, 0), (0, 0), (0, 3), (0, 7), (0, 7)),
        *((0, 7), (0, 7), (8, 13), (8, 13), (8, 13)),
    ]
    assert [(span.seen_begin, span.seen_end) for span in cross.seen.spans(inputs.rows)] == [
        (0, 7),
        (0, 13),
    ]
    assert cross.images.writes == (
        ImageWrite(b"a", 0, 3),
        ImageWrite(b"b", 3, 7),
        ImageWrite(b"c", 7, 12),
    )
    assert cross.images.indices.tolist() == [*range(7), *range(8, 13)]
    assert cross.images.slots.tolist() == [1] * 7 + [3] * 5
    assert cross.images.after_image.tolist() == [False] * 2 + [True] * 8


def test_text_before_the_first_image_may_see_all_images_and_their_padding():
    preparer = preparer_of((Full(), Cross(4, 6, lead_in=True, alignment=8)))
    spans = (ImageSpan(2, 1, False, b"a", 3), ImageSpan(4, 1, False, b"b", 4, 2))
    first = inputs_of(preparer, plan(chunk(1, 0, 2, spans=spans))).groups[1]
    assert first.begin.tolist() == [0, 0] and first.end.tolist() == [9, 9]
    assert first.images.writes == (ImageWrite(b"a", 0, 3), ImageWrite(b"b", 3, 9))
    assert first.images.indices.tolist() == [2, 3, 4, 5, 6, 7, 8, 0, 1]
    assert first.images.after_image.tolist() == [False, False]
    second = inputs_of(preparer, plan(chunk(1, 2, 4, spans=spans))).groups[1]
    assert second.begin.tolist() == [2, 2, 5, 5] and second.end.tolist() == [5, 5, 9, 9]
    assert second.images.writes == () and second.images.after_image.all()


def test_inserted_image_rows_have_their_batch_rows_and_feature_rows():
    preparer = preparer_of((Full(),))
    first, second = ImageSpan(5, 4, True, b"a"), ImageSpan(12, 6, False, b"b", first_row=10)
    beside, unknown = ImageSpan(0, 1, False, b"c", 3), ImageSpan(2, 2, False, b"d")
    inputs = inputs_of(
        preparer,
        plan(
            chunk(0, 3, 11, spans=(first, second), images=b"ab"),
            chunk(1, 7, 1),
            chunk(2, 14, 3, spans=(beside, unknown, first, second), images=b"abc"),
        ),
    )
    assert inputs.image_rows.tolist() == [2, 3, 4, 5, 9, 10, 12, 13, 14]
    assert inputs.images == (
        FeatureRows(b"a", 0, 4),
        FeatureRows(b"b", 10, 12),
        FeatureRows(b"b", 12, 15),
    )
    assert inputs.axes is None
    plain = inputs_of(preparer, plan(chunk(0, 0, 2)))
    assert plain.images == () and plain.image_rows.tolist() == []
