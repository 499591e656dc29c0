"""Random schedules on a pretend device that runs launched plans late, over simulated pages.

Every sequence must get exactly the tokens that it gets alone, recomputed from scratch.
"""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from runtime.kv.ledger import PageLedger
from runtime.kv.spec import CacheKind, Chunked, Full, Sliding
from runtime.request import GenerationRequest, ImageSpan, Sampled, StopRules
from runtime.scheduler import Scheduler, State, StepPlan

VOCABULARY = 50
LONGEST = 40
SEEDS = 200


@dataclass
class Tally:
    checked: int = 0
    preemptions: int = 0
    reused: int = 0


def mix(*values: object) -> int:
    return hash(values) & 0xFFFFFFFF


def identity(request: GenerationRequest, tokens: list[int], position: int) -> object:
    """What the pretend model sees at a position: a token, or a row of an image."""
    for span in request.spans:
        if span.start <= position < span.end:
            return (int.from_bytes(span.digest, "big"), position - span.start)
    return tokens[position]


def visible(kind: CacheKind, position: int, spans: tuple[ImageSpan, ...]) -> range:
    end = position
    for span in spans:
        if span.whole and span.start <= position < span.end:
            end = span.end - 1
    return range(kind.first_visible(position), end + 1)


def answer_alone(request: GenerationRequest, kinds: list[CacheKind]) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.stop.max_tokens):
        x = [mix("e", identity(request, tokens, i)) for i in range(len(tokens))]
        for number, kind in enumerate(kinds):
            stored = [mix(number, value) for value in x]
            x = [
                mix(x[p], *[stored[q] for q in visible(kind, p, request.spans)])
                for p in range(len(x))
            ]
        tokens.append(x[-1] % VOCABULARY)
        if tokens[-1] in request.stop.end_tokens:
            break
    return tokens


class PretendDevice:
    """Pages as lists; the last sampled token of each slot stays here."""

    def __init__(self, kinds: list[CacheKind], pages: list[int], size: int, slots: int) -> None:
        self.kinds, self.size = kinds, size
        self.memory = [[[None] * size for _ in range(count)] for count in pages]
        self.tables: list[list[dict[int, int]]] = [[{} for _ in range(slots)] for _ in kinds]
        self.last: list[int | None] = [None] * slots
        self.loaded: list[tuple[int, ...] | None] = [None] * slots

    def execute(self, plan: StepPlan) -> tuple[Sampled | None, ...]:
        for write in plan.page_writes:
            self.tables[write.group][write.slot][write.index] = write.page
        for load in plan.slot_loads:
            self.loaded[load.slot] = load.tokens
        rows = [self._embed(chunk) for chunk in plan.chunks]
        for group, kind in enumerate(self.kinds):
            for chunk, x in zip(plan.chunks, rows, strict=True):
                for offset, value in enumerate(x):
                    page, cell = self._cell(group, chunk.slot, chunk.start + offset)
                    page[cell] = mix(group, value)
            rows = [
                [self._attend(group, kind, chunk, i, value) for i, value in enumerate(x)]
                for chunk, x in zip(plan.chunks, rows, strict=True)
            ]
        results: list[Sampled | None] = []
        for chunk, x in zip(plan.chunks, rows, strict=True):
            token = x[-1] % VOCABULARY
            if chunk.samples:
                self.last[chunk.slot] = token
            results.append(Sampled(token) if chunk.samples else None)
        return tuple(results)

    def _embed(self, chunk) -> list[int]:
        request = chunk.sequence.request
        tokens = list(chunk.known)
        if chunk.feedback:
            assert chunk.length == 1 and not tokens
            tokens = [self.last[chunk.slot]]
        assert len(tokens) == chunk.length
        loaded = self.loaded[chunk.slot]
        assert loaded is not None and loaded[: len(request.prompt)] == request.prompt
        padded = [0] * chunk.start + tokens
        return [
            mix("e", identity(request, padded, i))
            for i in range(chunk.start, chunk.start + chunk.length)
        ]

    def _attend(self, group, kind, chunk, offset, value) -> int:
        seen = []
        for q in visible(kind, chunk.start + offset, chunk.sequence.request.spans):
            page, cell = self._cell(group, chunk.slot, q)
            seen.append(page[cell])
        return mix(value, *seen)

    def _cell(self, group: int, slot: int, position: int):
        page = self.tables[group][slot][position // self.size]
        return self.memory[group][page], position % self.size


def random_request(r: random.Random, number: int, base: tuple[int, ...]) -> GenerationRequest:
    length = r.randint(1, 24)
    cut = r.randint(0, length)
    prompt = base[:cut] + tuple(r.randrange(1, VOCABULARY) for _ in range(length - cut))
    spans: tuple[ImageSpan, ...] = ()
    if length > 10 and r.random() < 0.5:
        start, size = r.randint(0, length - 8), r.randint(3, 6)
        digest = bytes([r.randrange(3), size])  # few images, so that they repeat
        spans = (ImageSpan(start, size, digest[0] < 2, digest),)
    ends = frozenset([r.randrange(VOCABULARY)]) if r.random() < 0.7 else frozenset()
    stop = StopRules(max_tokens=r.randint(1, LONGEST - length), end_tokens=ends)
    return GenerationRequest(str(number), prompt, stop, spans=spans)


def trial(seed: int, depth: int, prefix_cache: bool, tally: Tally) -> None:
    r = random.Random(seed)
    size, slots, budget = r.choice([2, 4]), r.choice([2, 4, 6]), r.choice([8, 12, 20])
    kinds: list[CacheKind] = [Full(), Sliding(r.randint(2, 9)), Chunked(r.choice([3, 4, 8]))]
    r.shuffle(kinds)
    pages = [-(-(LONGEST + 2) // size) + r.randint(1, 30) for _ in kinds]
    ledger = PageLedger(kinds, pages, page_tokens=size, prefix_cache=prefix_cache)
    scheduler = Scheduler(ledger, slots=slots, step_tokens=budget)
    device = PretendDevice(kinds, pages, size, slots)
    base = tuple(r.randrange(1, VOCABULARY) for _ in range(24))
    todo = [random_request(r, i, base) for i in range(r.randint(3, 14))]
    sequences, aborted = drive(r, scheduler, device, todo, depth)
    for sequence in sequences:
        if sequence in aborted:
            continue
        assert sequence.tokens == answer_alone(sequence.request, kinds), (seed, depth)
        tally.checked += 1
        tally.reused += sequence.cached
    ledger.check_idle()
    assert ledger.pages_owned == 0
    tally.preemptions += scheduler.preemptions


def drive(r, scheduler, device, todo, depth):
    sequences, aborted, in_flight, idle = [], set(), deque(), 0
    while todo or scheduler.running or scheduler.waiting or in_flight:
        while todo and r.random() < 0.5:
            sequences.append(scheduler.add(todo.pop()))
        if sequences and r.random() < 0.02:
            victim = r.choice(sequences)
            if victim.state is not State.FINISHED:
                scheduler.finish(victim)
                aborted.add(victim)
        plan = scheduler.plan()
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (len(in_flight) >= depth or plan is None):
            oldest = in_flight.popleft()
            scheduler.retire(oldest, device.execute(oldest))
        idle = idle + 1 if plan is None and not in_flight and not todo else 0
        assert idle < 50, "the scheduler is stuck"
    return sequences, aborted


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_sequence_gets_the_tokens_it_gets_alone(depth: int, prefix_cache: bool) -> None:
    tally = Tally()
    for seed in range(SEEDS):
        trial(seed, depth, prefix_cache, tally)
    assert tally.checked > SEEDS
    assert tally.preemptions > 0, "the trials never ran short of pages, so they show too little"
    assert (tally.reused > 0) == prefix_cache
