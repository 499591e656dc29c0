"""Random schedules on a pretend device that runs launched plans late, over simulated pages.

Every sequence must get exactly the tokens that it gets alone, recomputed from scratch, and no row
may see a cell that does not hold what this row's own sequence has at that index. In half of the
trials an encoder has to come first: late, in any order, for few images at a time, and it may fail.
Some requests go on in a shifted context. Requests belong to a few tenants; test_fair_scheduling.py
checks in which order they are admitted. In half of the trials tokens are proposed, right and wrong.
"""

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import cache

import pytest

from runtime.engine.context_shift import cut_of
from runtime.engine.request import (
    ContextShift,
    GenerationRequest,
    ImageSpan,
    ResumeState,
    Sampled,
    StopRules,
)
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence, SequenceState
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.host_store import HostPages, TransferCosts
from runtime.kv.page_group import CopyKind
from runtime.kv.spec import CacheKind, Chunked, Cross, Full, Sliding
from tests.unit.runtime.engine.random_proposals import RandomProposals

VOCABULARY = 50
LONGEST = 40
IMAGES, IMAGE_ROWS = 3, 9
SEEDS = 100
TENANTS = ("one", "two", "three")

Row = tuple[bytes, int]


@dataclass
class Tally:
    checked: int = 0
    preemptions: int = 0
    shifts: int = 0
    reused: int = 0
    images_reused: int = 0
    encoded: int = 0
    failed: int = 0
    waits: int = 0
    restored: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Picture:
    digest: bytes


def mix(*values: object) -> int:
    return hash(values) & 0xFFFFFFFF


def identity(spans: tuple[ImageSpan, ...], tokens: list[int], position: int) -> object:
    """What the pretend model sees at a position: a token, or a row of an image."""
    for span in spans:
        if span.start <= position < span.end:
            return (int.from_bytes(span.digest, "big"), span.first_row + position - span.start)
    return tokens[position]


def visible(kind: CacheKind, position: int, spans: tuple[ImageSpan, ...]) -> range:
    end = position
    for span in spans:
        inside = span.whole and span.start <= position < span.end
        if inside and getattr(kind, "looks_ahead", True):
            end = span.end - 1
    match kind:
        case Sliding(window):
            return range(max(0, position - window + 1), end + 1)
        case Chunked(chunk):
            return range(position // chunk * chunk, end + 1)
        case _:
            return range(end + 1)


def visible_rows(kind: Cross, position: int, spans: tuple[ImageSpan, ...]) -> list[Row]:
    """The rows of images that a position sees: those of the last run before it, up to there."""
    begun = [span for span in spans if span.start <= position]
    if not begun:
        everything = [row for s in spans for row in [*rows_of(s), *padding_of(s)]]
        return everything if kind.lead_in else []
    run = [begun[-1]]
    while len(run) < len(begun) and begun[-1 - len(run)].end == run[0].start:
        run.insert(0, begun[-1 - len(run)])
    return [row for span in run for row in rows_of(span)]


def rows_of(span: ImageSpan) -> list[Row]:
    return [(span.digest, row) for row in range(span.cross_rows)]


def padding_of(span: ImageSpan) -> list[Row]:
    return [(span.digest, -1 - row) for row in range(span.cross_padding)]


def answer_alone(request: GenerationRequest, kinds: list[CacheKind]) -> tuple[int, ...]:
    return whole_answer(request.prompt, request.spans, request.stop, request.shift, tuple(kinds))


@cache  # requests of a trial are the same in all tests
def whole_answer(
    prompt: tuple[int, ...],
    spans: tuple[ImageSpan, ...],
    stop: StopRules,
    shift: ContextShift | None,
    kinds: tuple[CacheKind, ...],
) -> tuple[int, ...]:
    tokens = list(prompt)
    answer: list[int] = []
    for _ in range(stop.max_tokens):
        if shift is not None and len(tokens) == shift.context_tokens:
            cut = cut_of(shift, len(prompt), spans)
            tokens, spans = tokens[: cut.begin] + tokens[cut.end :], cut.spans(spans)
        x = [mix("e", identity(spans, tokens, i)) for i in range(len(tokens))]
        for number, kind in enumerate(kinds):
            x = answer_of_layer(number, kind, spans, x)
        tokens.append(x[-1] % VOCABULARY)
        answer.append(tokens[-1])
        if tokens[-1] in stop.end_tokens:
            break
    return tuple(answer)


def answer_of_layer(
    number: int, kind: CacheKind, spans: tuple[ImageSpan, ...], x: list[int]
) -> list[int]:
    if isinstance(kind, Cross):
        seen = [[mix(number, row) for row in visible_rows(kind, p, spans)] for p in range(len(x))]
    else:
        stored = [mix(number, value) for value in x]
        seen = [[stored[q] for q in visible(kind, p, spans)] for p in range(len(x))]
    return [mix(value, *sorted(some)) for value, some in zip(x, seen, strict=True)]


class PretendDevice:
    """Pages as lists of what each cell holds and its value; each slot's drawn tokens stay here."""

    def __init__(self, kinds: list[CacheKind], pages: list[int], size: int, slots: int) -> None:
        self.kinds, self.size = kinds, size
        self.memory = [[[None] * size for _ in range(count)] for count in pages]
        self.host: list[dict[int, list]] = [{} for _ in kinds]
        self.tables: list[list[dict[int, int]]] = [[{} for _ in range(slots)] for _ in kinds]
        self.drawn: list[dict[int, int]] = [{} for _ in range(slots)]
        self.loaded: list[tuple[int, ...] | None] = [None] * slots
        self.filled: set[tuple[object, ...]] = set()

    def execute(self, plan: StepPlan) -> tuple[Sampled | None, ...]:
        for write in plan.page_writes:
            self.tables[write.group][write.slot][write.index] = write.page
        for group, source, target, kind in plan.page_copies:
            sources = self.host if kind is CopyKind.FROM_HOST else self.memory
            targets = self.host if kind is CopyKind.TO_HOST else self.memory
            targets[group][target] = list(sources[group][source])
        for load in plan.slot_loads:
            self.loaded[load.slot] = load.tokens
        rows = [self._embed(chunk) for chunk in plan.chunks]
        for group, kind in enumerate(self.kinds):
            for chunk, x in zip(plan.chunks, rows, strict=True):
                if isinstance(kind, Cross):
                    self._fill_images(group, kind, chunk)
                else:
                    self._fill_positions(group, chunk, x)
            rows = [
                self._attend(group, kind, chunk, x)
                for chunk, x in zip(plan.chunks, rows, strict=True)
            ]
        results: list[Sampled | None] = []
        for chunk, x in zip(plan.chunks, rows, strict=True):
            token = x[-1] % VOCABULARY
            if chunk.samples:
                self.drawn[chunk.slot][chunk.start + chunk.length] = token
            results.append(Sampled(token) if chunk.samples else None)
        return tuple(results)

    def _embed(self, chunk) -> list[int]:
        sequence = chunk.sequence
        tokens = list(chunk.known)
        if chunk.feedback:
            assert chunk.length == 1 and not tokens
            tokens = [self.drawn[chunk.slot][chunk.start]]
        assert len(tokens) == chunk.length
        loaded = self.loaded[chunk.slot]
        assert loaded is not None and list(loaded) == sequence.tokens[: len(loaded)]
        padded = [0] * chunk.start + tokens
        return [
            mix("e", identity(sequence.spans, padded, i))
            for i in range(chunk.start, chunk.start + chunk.length)
        ]

    def _fill_positions(self, group: int, chunk, x: list[int]) -> None:
        for position, value in enumerate(x, chunk.start):
            page, cell = self._cell(group, chunk.slot, position)
            page[cell] = (position, mix(group, value))

    def _fill_images(self, group: int, kind: Cross, chunk) -> None:
        sequence = chunk.sequence
        for place in kind.filled_images(chunk.start, chunk.start + chunk.length, sequence.spans):
            once = (group, sequence.request.id, chunk.epoch, place.image.start)
            assert once not in self.filled, "an image's rows are filled again"
            self.filled.add(once)
            named = zip(place.rows, rows_of(place.image), strict=True)
            assert len(place.padding) in (0, place.image.cross_padding)
            padding = zip(place.padding, padding_of(place.image), strict=False)
            for index, row in [*named, *padding]:
                page, cell = self._cell(group, chunk.slot, index)
                page[cell] = (row, mix(group, row))

    def _attend(self, group: int, kind: CacheKind, chunk, x: list[int]) -> list[int]:
        spans, end = chunk.sequence.spans, chunk.start + chunk.length
        begins, ends = kind.seen(chunk.start, end, spans)
        answers = []
        for offset, (begin, stop) in enumerate(zip(begins, ends, strict=True)):
            cells = [self._cell(group, chunk.slot, index) for index in range(begin, stop)]
            held = [page[cell] for page, cell in cells]
            position = chunk.start + offset
            expected = (
                visible_rows(kind, position, spans)
                if isinstance(kind, Cross)
                else list(visible(kind, position, spans))
            )
            assert sorted(what for what, _ in held) == sorted(expected)
            answers.append(mix(x[offset], *sorted(value for _, value in held)))
        return answers

    def _cell(self, group: int, slot: int, index: int):
        page = self.tables[group][slot][index // self.size]
        return self.memory[group][page], index % self.size


class PretendEncoder:
    """Has room for a few images, and finishes them when it likes."""

    def __init__(self, r: random.Random, room: int, tally: Tally) -> None:
        self.r, self.room, self.tally = r, room, tally
        self.eager = r.choice([0.0, 0.1, 0.5, 1.0])
        self.coming: list[bytes] = []
        self.there: list[bytes] = []
        self.wanted: list[bytes] = []

    def ready(self, digest: bytes) -> bool:
        return digest in self.there

    def provide(self, wanted: list[bytes]) -> None:
        """The first of them, as many as there is room for, in place of others."""
        self.wanted = list(dict.fromkeys(wanted))[: self.room]
        self.coming = [d for d in self.coming if d in self.wanted or self.r.random() < 0.5]
        for digest in self.wanted:
            if digest in [*self.there, *self.coming]:
                continue
            unwanted = [d for d in self.there if d not in self.wanted]
            while unwanted and len(self.there) + len(self.coming) >= self.room:
                self.there.remove(unwanted.pop(self.r.randrange(len(unwanted))))
            if len(self.there) + len(self.coming) < self.room:
                self.coming.append(digest)

    def work(self, *, must: bool) -> bytes | None:
        """Perhaps finish an image; the digest of one that failed. `must`: nothing else happens."""
        if not self.coming or not (must or self.r.random() < self.eager):
            return None
        digest = self.coming.pop(self.r.randrange(len(self.coming)))
        if self.r.random() < 0.06:
            self.tally.failed += 1
            return digest
        self.tally.encoded += 1
        self.there.append(digest)
        return None


def random_request(
    r: random.Random, number: int, base: tuple[int, ...], beside: bool
) -> GenerationRequest:
    length = r.randint(1, 24)
    cut = r.randint(0, length)
    prompt = base[:cut] + tuple(r.randrange(1, VOCABULARY) for _ in range(length - cut))
    spans = random_spans(r, length, beside) if r.random() < 0.6 else ()
    ends = frozenset([r.randrange(VOCABULARY)]) if r.random() < 0.7 else frozenset()
    stop = StopRules(max_tokens=r.randint(1, LONGEST - length), end_tokens=ends)
    images = tuple(Picture(digest) for digest in {span.digest for span in spans})
    shift = None
    if r.random() < 0.3:
        shift = ContextShift(r.randint(length + 1, LONGEST), r.choice([-1, 0, 4, length]))
        stop = replace(stop, max_tokens=r.randint(1, 4 * LONGEST))
    return GenerationRequest(
        str(number), prompt, stop, spans=spans, images=images, tenant=r.choice(TENANTS), shift=shift
    )


def follow_up(
    r: random.Random, first: GenerationRequest, second: GenerationRequest
) -> GenerationRequest:
    """The second one's text behind the first one's, with the first one's images."""
    prompt = (first.prompt + second.prompt)[: r.randint(len(first.prompt), LONGEST - 2)]
    stop = StopRules(r.randint(1, LONGEST - len(prompt)), second.stop.end_tokens)
    shift = None if second.shift is None else replace(second.shift, context_tokens=LONGEST)
    return replace(
        second, prompt=prompt, stop=stop, spans=first.spans, images=first.images, shift=shift
    )


def resumed(
    r: random.Random, request: GenerationRequest, kinds: list[CacheKind]
) -> GenerationRequest:
    """The request as another engine left it, somewhere in its answer."""
    drawn = answer_alone(request, kinds)
    return replace(request, resume=ResumeState(drawn[: r.randrange(len(drawn))]))


def random_spans(r: random.Random, length: int, beside: bool) -> tuple[ImageSpan, ...]:
    """A few images, so that they repeat, some of them neighbours; `beside` the text or in it."""
    spans: list[ImageSpan] = []
    start = r.choice([0, 0, 1, 3, 6])
    while len(spans) < IMAGES and start < length:
        kind, size = r.randrange(3), r.choice([1, 1, 3, 5])
        if start + size > length:
            break
        digest = bytes([kind, size])
        rows, padding = ((3, 7, 2)[kind], (0, 2, 5)[kind]) if beside else (0, 0)
        part = r.choice([0, 0, size])  # of two, which a picture has
        spans.append(ImageSpan(start, size, kind < 2, digest, rows, padding, part))
        start += size + r.choice([0, 0, 2, 7])
    return tuple(spans)


def random_kinds(r: random.Random, page_tokens: int) -> list[CacheKind]:
    alignment = page_tokens * r.choice([1, 1, 2, 4])
    kinds: list[CacheKind] = [
        Full(looks_ahead=r.random() < 0.7),
        Sliding(r.randint(2, 9), looks_ahead=r.random() < 0.7),
        Chunked(r.choice([3, 4, 8])),
        Cross(IMAGES, IMAGE_ROWS, lead_in=r.random() < 0.5, alignment=alignment),
    ]
    r.shuffle(kinds)
    return kinds[: r.choice([2, 3, 4, 4])]


def random_host_pages(r: random.Random, kinds: list[CacheKind]) -> HostPages:
    """Copies pay if they are few; then recomputation is the other way to go on."""
    few = r.choice([2, 10, 30])
    return HostPages([r.randint(0, few) for _ in kinds], [1] * len(kinds), TransferCosts(4.0))


def trial(seed: int, depth: int, prefix_cache: bool, tally: Tally) -> None:
    r = random.Random(seed)
    size, slots, budget = r.choice([2, 4]), r.choice([2, 4, 6]), r.choice([8, 12, 20])
    kinds = random_kinds(r, size)
    beside = any(isinstance(kind, Cross) for kind in kinds)
    pages = [-(-(kind.capacity(LONGEST) + 2) // size) + r.randint(1, 30) for kind in kinds]
    cache_manager = KVCacheManager(
        kinds,
        pages,
        page_tokens=size,
        prefix_cache=prefix_cache,
        host_pages=random_host_pages(r, kinds) if r.random() < 0.5 else None,
    )
    cache_manager.note_prefill_speed(r.choice([None, 1.0]))
    draws = slots + r.randint(0, budget - slots)
    speculation = RandomProposals(r, draws=draws, right=lambda asked: answer_alone(asked, kinds))
    scheduler = Scheduler(
        cache_manager,
        slots=slots,
        step_tokens=budget,
        step_image_rows=IMAGES * IMAGE_ROWS,
        speculation=speculation if r.random() < 0.5 else None,
    )
    device = PretendDevice(kinds, pages, size, slots)
    base = tuple(r.randrange(1, VOCABULARY) for _ in range(24))
    todo: list[GenerationRequest] = []
    for number in range(r.randint(3, 14)):
        asked = random_request(r, number, base, beside)
        asked = follow_up(r, r.choice(todo), asked) if number and r.random() < 0.4 else asked
        todo.append(resumed(r, asked, kinds) if r.random() < 0.2 else asked)
    encoder = PretendEncoder(r, r.randint(IMAGES if beside else 1, 4), tally)
    if r.random() < 0.5:
        encoder.there = [bytes([kind, size]) for kind in range(3) for size in range(1, 6)]
        encoder.room = len(encoder.there)
    answers, aborted = drive(r, scheduler, device, encoder, todo, depth, draws)
    for sequence, answer in answers.items():
        if sequence in aborted:
            continue
        assert tuple(answer) == answer_alone(sequence.request, kinds), (seed, depth)
        assert sequence.answered == len(answer)
        tally.checked += 1
        tally.reused += sequence.cached
        if beside:
            tally.images_reused += sum(s.start < sequence.cached for s in sequence.spans)
    cache_manager.check_idle()
    assert cache_manager.pages_owned == 0
    tally.preemptions += scheduler.preemptions
    tally.shifts += scheduler.shifts
    tally.proposed += scheduler.proposed_tokens
    tally.accepted += scheduler.accepted_tokens
    if cache_manager.host_store is not None:
        tally.restored += cache_manager.host_store.restored


def drive(r, scheduler, device, encoder, todo, depth, draws):
    answers: dict[Sequence, list[int]] = {}
    aborted, in_flight, idle = set(), deque(), 0
    plan: StepPlan | None = None
    while todo or scheduler.running or scheduler.waiting or in_flight:
        while todo and r.random() < 0.5:
            request = todo.pop()
            begun = () if request.resume is None else request.resume.tokens
            answers[scheduler.add(request)] = list(begun)
        if answers and r.random() < 0.02:
            victim = r.choice(list(answers))
            if victim.state is not SequenceState.FINISHED:
                scheduler.finish(victim)
                aborted.add(victim)
        stuck = plan is None and not in_flight
        failed = encoder.work(must=stuck)
        for want in scheduler.image_needs if failed else ():
            if want.digest == failed and want.sequence.state is not SequenceState.FINISHED:
                scheduler.finish(want.sequence)
                aborted.add(want.sequence)
        plan = scheduler.plan(encoder.ready)
        encoder.provide([want.digest for want in scheduler.image_needs])
        if plan is not None:
            check_features(plan, encoder, device.kinds)
            assert sum(chunk.samples for chunk in plan.chunks) <= draws
            assert sum(chunk.length for chunk in plan.chunks) <= scheduler.step_tokens
            in_flight.append(plan)
        elif not in_flight:
            check_waiting(scheduler, encoder)
        if in_flight and (len(in_flight) >= depth or plan is None):
            oldest = in_flight.popleft()
            for advance in scheduler.retire(oldest, device.execute(oldest)):
                answers[advance.sequence].append(advance.outcome.token)
        idle = idle + 1 if plan is None and not (in_flight or todo or encoder.coming) else 0
        assert idle < 50, "the scheduler is stuck"
    assert scheduler.plan() is None and scheduler.image_needs == (), "no sequence needs the image"
    return answers, aborted


def check_features(plan: StepPlan, encoder: PretendEncoder, kinds: list[CacheKind]) -> None:
    """What the rows of a step are made of is there, and stays."""
    for chunk in plan.chunks:
        begin, end = chunk.start, chunk.start + chunk.length
        spans = chunk.sequence.spans
        inside = [s for s in spans if s.start < end and begin < s.end and not s.cross_rows]
        filled = [place.image for kind in kinds for place in kind.filled_images(begin, end, spans)]
        for image in [*inside, *filled]:
            assert encoder.ready(image.digest), "rows of an image without its features"


def check_waiting(scheduler: Scheduler, encoder: PretendEncoder) -> None:
    """With nothing to compute, the first that could go on is asked for, and text waits for none
    but those who hold what it needs."""
    live = [*scheduler.running, *scheduler.waiting]
    if live:
        encoder.tally.waits += 1
        assert encoder.coming or encoder.wanted
        assert scheduler.running or all(sequence.request.images for sequence in live)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_sequence_gets_the_tokens_it_gets_alone(depth: int, prefix_cache: bool) -> None:
    tally = Tally()
    for seed in range(SEEDS):
        trial(seed, depth, prefix_cache, tally)
    assert tally.checked > SEEDS
    assert tally.preemptions > 0, "the trials never ran short of pages, so they show too little"
    assert tally.shifts > SEEDS
    assert (tally.reused > 0) == prefix_cache
    assert (tally.images_reused > 0) == prefix_cache
    assert (tally.restored > SEEDS // 4) == prefix_cache
    assert min(tally.encoded, tally.failed, tally.waits) > SEEDS // 25
    assert SEEDS < tally.accepted < tally.proposed - SEEDS
