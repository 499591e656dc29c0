"""Random schedules on a pretend device that runs launched plans late, over simulated pages.

Every sequence must get exactly the tokens that it gets alone, with contiguous caches, and no row
may see a cell that does not hold what this row's own sequence has at that index. In half of the
trials an encoder has to come first: late, in any order, for few images at a time, and it may fail.
Some requests go on in a shifted context, in half of the trials with moved pages where they can.
Requests belong to a few tenants, whose prefixes are salted in half of the trials;
test_fair_scheduling.py checks in which order they are admitted. In half of the trials tokens are
proposed, right and wrong; test_drafter.py has the steps of a draft model beside those of these.
Some answers have a grammar, whose masks depend on the tokens that the host knows, and may be late.
"""

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import combinations

import pytest

from runtime.engine.context_shift import cut_of
from runtime.engine.request import (
    ContextShift,
    GenerationRequest,
    ImageSpan,
    ResumeState,
    StopRules,
)
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence, SequenceState
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_kinds import CacheKind, Chunked, Cross, Full, Sliding, Symmetric
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.host_store import HostPages, TransferCosts
from tests.unit.runtime.engine.pretend_device import (
    VOCABULARY,
    LateMasks,
    PretendDevice,
    draw,
    identity,
    mix,
    number_of,
    visible,
    visible_rows,
)
from tests.unit.runtime.engine.pretend_grammar import CLASSES, PretendGrammar, class_after
from tests.unit.runtime.engine.random_proposals import RandomProposals

LONGEST = 40
IMAGES, IMAGE_ROWS = 3, 9
SEEDS = 30  # `make soak` tries random schedules of whole engines for longer
TENANTS = ("one", "two", "three")
SALTS = (b"", b"some", b"other")


@dataclass
class Tally:
    checked: int = 0
    preemptions: int = 0
    shifts: int = 0
    moved: int = 0
    reused: int = 0
    images_reused: int = 0
    encoded: int = 0
    failed: int = 0
    waits: int = 0
    restored: int = 0
    proposed: int = 0
    accepted: int = 0
    shared: int = 0
    separate: int = 0
    masked: int = 0
    late: int = 0
    overlapped: int = 0


@dataclass(frozen=True)
class Picture:
    digest: bytes


def moves(manager: KVCacheManager, request: GenerationRequest) -> bool:
    """Whether pages move, as a scheduler decides."""
    cut = request.shift and cut_of(request.shift, len(request.prompt), ())
    computed = request.shift and request.shift.context_tokens - 1
    return not request.spans and bool(cut and manager.can_shift(cut, computed))


def answer_alone(
    request: GenerationRequest, kinds: list[CacheKind], *, moves: bool
) -> tuple[int, ...]:
    grammar = request.grammar
    assert grammar is None or isinstance(grammar, PretendGrammar)
    asked = (request.prompt, request.stop, grammar, tuple(kinds))
    if moves:
        assert request.shift is not None
        return moving_answer(*asked, request.shift)
    return whole_answer(*asked, request.spans, request.shift)


@cache  # requests of a trial are the same in all tests
def whole_answer(
    prompt: tuple[int, ...],
    stop: StopRules,
    grammar: PretendGrammar | None,
    kinds: tuple[CacheKind, ...],
    spans: tuple[ImageSpan, ...],
    shift: ContextShift | None,
) -> tuple[int, ...]:
    tokens = list(prompt)
    answer: list[int] = []
    stored: list[list[int]] = [[] for _ in kinds]
    for _ in range(stop.max_tokens):
        if shift is not None and len(tokens) == shift.context_tokens:
            cut = cut_of(shift, len(prompt), spans)
            tokens, spans = tokens[: cut.begin] + tokens[cut.end :], cut.spans(spans)
            stored = [[] for _ in kinds]  # everything is computed again
        x = last_row(kinds, spans, tokens, stored)
        answer.append(draw(x, class_of_next(grammar, answer)))
        tokens.append(answer[-1])
        if tokens[-1] in stop.end_tokens:
            break
    return tuple(answer)


@cache
def moving_answer(
    prompt: tuple[int, ...],
    stop: StopRules,
    grammar: PretendGrammar | None,
    kinds: tuple[CacheKind, ...],
    shift: ContextShift,
) -> tuple[int, ...]:
    """With contiguous caches that lose what leaves, and keep the rest as it was computed."""
    cut = cut_of(shift, len(prompt), ())
    stored: list[list[int]] = [[] for _ in kinds]
    answer: list[int] = []
    todo = list(prompt)
    while True:
        for token in todo:
            x = mix(token)
            for number, (kind, cells) in enumerate(zip(kinds, stored, strict=True)):
                cells.append(mix(number, x))
                x = mix(x, *sorted(cells[q] for q in visible(kind, len(cells) - 1, ())))
        answer.append(draw(x, class_of_next(grammar, answer)))
        if len(answer) == stop.max_tokens or answer[-1] in stop.end_tokens:
            return tuple(answer)
        todo = answer[-1:]
        if len(stored[0]) == shift.context_tokens - 1:
            for cells in stored:
                del cells[cut.begin : cut.end]


def class_of_next(grammar: PretendGrammar | None, answer: list[int]) -> int | None:
    """That a token behind `answer` must have, if any."""
    return None if grammar is None else reduce(class_after, answer, grammar.first)


def last_row(
    kinds: tuple[CacheKind, ...],
    spans: tuple[ImageSpan, ...],
    tokens: list[int],
    stored: list[list[int]],
) -> int:
    """The value of the last row, by contiguous caches: `stored` has for each layer what it keeps of
    the first tokens, with all images among them, and gets the rest."""
    places = range(len(stored[0]), len(tokens))
    x = [mix(identity(spans, tokens, place)) for place in places]
    for number, (kind, cells) in enumerate(zip(kinds, stored, strict=True)):
        cells += [mix(number, value) for value in x]
        if isinstance(kind, Cross):
            rows = [visible_rows(kind, place, spans) for place in places]
            seen = [[mix(number, number_of(row)) for row in some] for some in rows]
        else:
            seen = [[cells[q] for q in visible(kind, place, spans)] for place in places]
        x = [mix(value, *sorted(some)) for value, some in zip(x, seen, strict=True)]
    return x[-1]


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


def random_requests(
    r: random.Random, manager: KVCacheManager, kinds: list[CacheKind], *, most: int, moving: bool
) -> list[GenerationRequest]:
    """Many begin alike. In half of the calls tenants have salts, of which some may be equal."""
    base = tuple(r.randrange(1, VOCABULARY) for _ in range(24))
    beside = any(isinstance(kind, Cross) for kind in kinds)
    salted = r.random() < 0.5
    salts = {tenant: r.choice(SALTS) if salted else b"" for tenant in TENANTS}
    made: list[GenerationRequest] = []
    for number in range(r.randint(3, most)):
        asked = random_request(r, number, base, beside, moving=moving)
        asked = follow_up(r, r.choice(made), asked) if number and r.random() < 0.4 else asked
        if r.random() < 0.2:
            asked = resumed(r, asked, kinds, moves=moves(manager, asked))
        made.append(replace(asked, cache_salt=salts[asked.tenant]))
    return made


def separate_beginnings(requests: list[GenerationRequest], page_tokens: int) -> int:
    """Pairs of requests that would share a page if they had the same salt."""
    return sum(
        one.cache_salt != other.cache_salt
        and one.prompt[:page_tokens] == other.prompt[:page_tokens]
        and not one.spans + other.spans
        for one, other in combinations(requests, 2)
    )


def random_request(
    r: random.Random, number: int, base: tuple[int, ...], beside: bool, *, moving: bool
) -> GenerationRequest:
    length = r.randint(1, 24)
    cut = r.randint(0, length)
    prompt = base[:cut] + tuple(r.randrange(1, VOCABULARY) for _ in range(length - cut))
    spans = random_spans(r, length, beside) if r.random() < (0.2 if moving else 0.6) else ()
    ends = frozenset([r.randrange(VOCABULARY)]) if r.random() < 0.7 else frozenset()
    stop = StopRules(max_tokens=r.randint(1, LONGEST - length), end_tokens=ends)
    images = tuple(Picture(digest) for digest in {span.digest for span in spans})
    shift = None
    if r.random() < (0.7 if moving else 0.3):
        shift = ContextShift(r.randint(length + 1, LONGEST), r.choice([-1, 0, 4, length]))
        stop = StopRules(r.randint(1, 4 * LONGEST), frozenset() if moving else ends)
    return GenerationRequest(
        str(number),
        prompt,
        stop,
        spans=spans,
        images=images,
        tenant=r.choice(TENANTS),
        grammar=PretendGrammar(r.randrange(CLASSES)) if r.random() < 0.3 else None,
        shift=shift,
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
    r: random.Random, request: GenerationRequest, kinds: list[CacheKind], *, moves: bool
) -> GenerationRequest:
    """The request as another engine left it, somewhere in its answer."""
    drawn = answer_alone(request, kinds, moves=moves)
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


def random_kinds(r: random.Random, page_tokens: int, *, moving: bool) -> list[CacheKind]:
    alignment = page_tokens * r.choice([1, 1, 2, 4])
    kinds: list[CacheKind] = [
        Full(looks_ahead=r.random() < 0.7),
        Sliding(r.randint(2, 9), looks_ahead=r.random() < 0.7),
        Chunked(r.choice([3, 4, 8])),
        Cross(IMAGES, IMAGE_ROWS, lead_in=r.random() < 0.5, alignment=alignment),
        Symmetric(r.randint(0, 6)),
    ]
    if moving:  # with chunks, pages can move by multiples of them only
        return kinds[r.choice([0, 0, 0, 1]) : r.choice([2, 2, 3])]
    r.shuffle(kinds)
    return kinds[: r.choice([2, 3, 4, 4])]


def random_host_pages(r: random.Random, kinds: list[CacheKind]) -> HostPages:
    """Copies pay if they are few; then recomputation is the other way to go on."""
    few = r.choice([2, 10, 30])
    return HostPages([r.randint(0, few) for _ in kinds], [1] * len(kinds), TransferCosts(4.0))


def trial(seed: int, depth: int, prefix_cache: bool, tally: Tally) -> None:
    r = random.Random(seed)
    size, slots, budget = r.choice([2, 4]), r.choice([2, 4, 6]), r.choice([8, 12, 20])
    moving = r.random() < 0.4
    kinds = random_kinds(r, size, moving=moving)
    beside = any(isinstance(kind, Cross) for kind in kinds)
    pages = [-(-(kind.capacity(LONGEST) + 2) // size) + r.randint(1, 30) for kind in kinds]
    cache_manager = KVCacheManager(
        kinds,
        pages,
        page_tokens=size,
        prefix_cache=prefix_cache,
        moves_keys=moving,
        host_pages=random_host_pages(r, kinds) if r.random() < 0.5 else None,
    )
    cache_manager.note_prefill_speed(r.choice([None, 1.0]))
    draws = slots + r.randint(0, budget - slots)

    def right(asked: GenerationRequest) -> tuple[int, ...]:
        return answer_alone(asked, kinds, moves=moves(cache_manager, asked))

    speculation = RandomProposals(r, draws=draws, right=right)
    scheduler = Scheduler(
        cache_manager,
        slots=slots,
        step_tokens=budget,
        step_image_rows=IMAGES * IMAGE_ROWS,
        speculation=speculation if r.random() < 0.5 else None,
    )
    late = LateMasks(r, r.choice([0.0, 0.3]))
    device = PretendDevice(kinds, pages, size, slots, late)
    todo = random_requests(r, cache_manager, kinds, most=14, moving=moving)
    tally.separate += separate_beginnings(todo, size)
    encoder = PretendEncoder(r, r.randint(IMAGES if beside else 1, 4), tally)
    if r.random() < 0.5:
        encoder.there = [bytes([kind, size]) for kind in range(3) for size in range(1, 6)]
        encoder.room = len(encoder.there)
    answers, aborted = drive(r, scheduler, device, encoder, todo, depth, draws)
    for sequence, answer in answers.items():
        if sequence in aborted:
            continue
        moved = sequence.moving_cut is not None
        assert tuple(answer) == answer_alone(sequence.request, kinds, moves=moved), (seed, depth)
        tally.moved += moved and len(answer) > sequence.request.shift.context_tokens
        assert sequence.answered == len(answer)
        tally.checked += 1
        tally.reused += sequence.cached
        if beside:
            tally.images_reused += sum(s.start < sequence.cached for s in sequence.spans)
    cache_manager.check_idle()
    assert cache_manager.pages_owned == 0
    tally.shared += device.shared
    tally.masked += device.masked
    tally.late += late.count
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
        awaited = any(s.matcher is not None and s.pending for s in scheduler.running)
        plan = scheduler.plan(encoder.ready)
        encoder.provide([want.digest for want in scheduler.image_needs])
        if plan is not None:
            encoder.tally.overlapped += awaited and any(chunk.feedback for chunk in plan.chunks)
            check_features(plan, encoder, device.kinds)
            assert sum(chunk.samples for chunk in plan.chunks) <= draws
            assert sum(chunk.length for chunk in plan.chunks) <= scheduler.step_tokens
            in_flight.append(device.launch(plan))
        elif not in_flight:
            check_waiting(scheduler, encoder)
        if in_flight and (len(in_flight) >= depth or plan is None):
            oldest = in_flight.popleft()
            for advance in scheduler.retire(oldest.plan, device.collect(oldest)):
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
    assert tally.shifts > SEEDS and tally.moved > SEEDS // 5
    assert (tally.reused > 0) == prefix_cache
    assert (tally.images_reused > 0) == prefix_cache
    assert (tally.restored > SEEDS // 4) == prefix_cache
    assert (tally.shared > SEEDS) == prefix_cache and tally.separate > SEEDS
    assert min(tally.masked, tally.late) > SEEDS
    assert (tally.overlapped > SEEDS) == (depth > 1), "sequences without a grammar waited, too"
    assert min(tally.encoded, tally.waits) > SEEDS // 25 and tally.failed
    assert SEEDS < tally.accepted < tally.proposed - SEEDS


@pytest.mark.parametrize("pages", [21, 40, 60])
def test_shared_pages_are_copied_before_they_move(pages: int) -> None:
    kinds: list[CacheKind] = [Full(), Sliding(7)]
    cache_manager = KVCacheManager(kinds, [pages, 60], page_tokens=2, moves_keys=True)
    scheduler = Scheduler(cache_manager, slots=4, step_tokens=40)
    device = PretendDevice(kinds, [pages, 60], 2, 4)
    prompt = tuple(range(3, 37))  # the last pages of which move
    shift = ContextShift(LONGEST, keep=5)
    todo = [
        GenerationRequest(str(n), prompt, StopRules(20 * (n + 1)), shift=shift) for n in range(4)
    ]
    r = random.Random(1)
    encoder = PretendEncoder(r, 1, Tally())
    drive(r, scheduler, device, encoder, [GenerationRequest("first", prompt, StopRules(1))], 2, 40)
    answers, aborted = drive(r, scheduler, device, encoder, todo, 2, 40)
    for sequence, answer in answers.items():
        if sequence not in aborted:
            assert tuple(answer) == answer_alone(sequence.request, kinds, moves=True)
    assert (device.copied > 0, scheduler.preemptions > 0) == (pages > 21, pages < 60)
    cache_manager.check_idle()
