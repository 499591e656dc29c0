"""States of sequences: the cache kind, and random schedules on a fake device.

The device runs launched plans late. A page must hold just what the sequence's own tokens before the
step make of it, whatever was preempted, ended or handed on in between.
"""

import random
from collections import deque

import pytest

from runtime.engine.request import GenerationRequest, Sampled, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence, SequenceState
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.spec import CacheLayout, Full, LayerCache, Sliding
from runtime.kv.states import Recurrent, StateCache

VOCABULARY, LONGEST, SEEDS = 50, 40, 150
STATE = StateCache(Recurrent(), kv_heads=3, key_dim=4, value_dim=5, channels=7, taps=2)


def test_a_sequence_keeps_one_page_from_its_first_position_on() -> None:
    kind = Recurrent()
    assert [kind.extent(end) for end in (0, 1, 2, 999)] == [0, 1, 1, 1]
    assert {kind.first_visible(position) for position in range(50)} == {0}
    assert kind.seen(3, 6) == ([0, 0, 0], [1, 1, 1])
    assert kind.seen(0, 2) == ([0, 0], [0, 0])
    layout = CacheLayout.of([LayerCache(Full(), 1, 2, 2), STATE, STATE], page_tokens=16)
    assert [group.layers for group in layout.groups] == [(0,), (1, 2)]
    assert layout.capacity_pages(1000) == (63, 1)
    assert layout.held_pages(1000, 64) == (63, 1)


def test_layers_with_other_sizes_form_separate_groups() -> None:
    other = StateCache(Recurrent(), kv_heads=3, key_dim=4, value_dim=5, channels=7, taps=3)
    plain = LayerCache(Recurrent(), 3, 4, 5)
    assert len(CacheLayout.of([STATE, other, plain, STATE], page_tokens=4).groups) == 3


def sequence_of(tokens: range) -> Sequence:
    return Sequence(GenerationRequest("a", tuple(tokens), StopRules(1)), list(tokens))


@pytest.mark.parametrize("kinds", [[Full()], [Full(), Recurrent()]], ids=["full", "hybrid"])
def test_no_prefix_is_cached_if_a_group_has_states(kinds) -> None:
    cache_manager = KVCacheManager(kinds, [20] * len(kinds), page_tokens=4)
    first, second = sequence_of(range(20)), sequence_of(range(20))
    assert cache_manager.reserve(first, 20) is not None
    first.confirmed = 20
    cache_manager.publish(first)
    cache_manager.trim(first)
    assert cache_manager.cached_prefix(second) == (16 if len(kinds) == 1 else 0)
    assert cache_manager.adopt(second)[0] == (16 if len(kinds) == 1 else 0)
    for sequence in (first, second):
        cache_manager.release(sequence)
    cache_manager.check_idle()


def grown(state: int, token: int) -> int:
    return hash((state, token)) & 0xFFFFFFFF


def answer_alone(request: GenerationRequest) -> list[int]:
    tokens, state = list(request.prompt), 0
    for token in request.prompt:
        state = grown(state, token)
    for _ in range(request.stop.max_tokens):
        tokens.append(state % VOCABULARY)
        if tokens[-1] in request.stop.end_tokens:
            break
        state = grown(state, tokens[-1])
    return tokens


class PretendDevice:
    """The pages of group `number`: the number of tokens of each state, and its value."""

    def __init__(self, number: int, pages: int, slots: int) -> None:
        self.number = number
        self.pages = [(-1, -1)] * pages
        self.tables = [-1] * slots
        self.last = [-1] * slots

    def execute(self, plan: StepPlan) -> tuple[Sampled | None, ...]:
        for write in plan.page_writes:
            if write.group == self.number:
                assert write.index == 0
                self.tables[write.slot] = write.page
        written = [self.tables[chunk.slot] for chunk in plan.chunks]
        assert len(set(written)) == len(written), "two sequences have one page"
        return tuple(map(self._advance, plan.chunks))

    def _advance(self, chunk) -> Sampled | None:
        page = self.tables[chunk.slot]
        length, state = self.pages[page] if chunk.start else (0, 0)
        assert length == chunk.start, "the state is that of another length"
        for token in [self.last[chunk.slot]] if chunk.feedback else chunk.known:
            state = grown(state, token)
        self.pages[page] = (chunk.start + chunk.length, state)
        if chunk.samples:
            self.last[chunk.slot] = state % VOCABULARY
        return Sampled(state % VOCABULARY) if chunk.samples else None


def random_request(r: random.Random, number: int, base: tuple[int, ...]) -> GenerationRequest:
    length = r.randint(1, 24)
    cut = r.randint(0, length)
    own = tuple(r.randrange(1, VOCABULARY) for _ in range(length - cut))
    ends = frozenset([r.randrange(VOCABULARY)]) if r.random() < 0.7 else frozenset()
    stop = StopRules(max_tokens=r.randint(1, LONGEST - length), end_tokens=ends)
    return GenerationRequest(str(number), base[:cut] + own, stop)


def trial(seed: int, depth: int) -> tuple[int, int]:
    """The number of right answers, and of preemptions."""
    r = random.Random(seed)
    size, slots, budget = r.choice([2, 4]), r.choice([2, 4, 6]), r.choice([8, 12, 20])
    kinds = [Full(), Recurrent(), *([Sliding(5)] if r.random() < 0.3 else [])]
    r.shuffle(kinds)
    few = LONGEST // size + 1
    pages = [r.randint(1, slots) if kind.by_sequence else r.randint(few, 3 * few) for kind in kinds]
    cache_manager = KVCacheManager(kinds, pages, page_tokens=size)
    scheduler = Scheduler(cache_manager, slots=slots, step_tokens=budget)
    number = kinds.index(Recurrent())
    device = PretendDevice(number, pages[number], slots)
    base = tuple(r.randrange(1, VOCABULARY) for _ in range(24))
    todo = [random_request(r, number, base) for number in range(r.randint(3, 14))]
    sequences, aborted, in_flight = [], set(), deque()
    while todo or scheduler.running or scheduler.waiting or in_flight:
        while todo and r.random() < 0.5:
            sequences.append(scheduler.add(todo.pop()))
        if sequences and r.random() < 0.02:
            victim = r.choice(sequences)
            if victim.state is not SequenceState.FINISHED:
                scheduler.finish(victim)
                aborted.add(victim)
        plan = scheduler.plan()
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (len(in_flight) >= depth or plan is None):
            oldest = in_flight.popleft()
            scheduler.retire(oldest, device.execute(oldest))
    finished = [sequence for sequence in sequences if sequence not in aborted]
    for sequence in finished:
        assert sequence.tokens == answer_alone(sequence.request), (seed, depth)
        assert sequence.cached == 0
    cache_manager.check_idle()
    return len(finished), scheduler.preemptions


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_sequence_gets_the_tokens_it_gets_alone(depth: int) -> None:
    tallies = [trial(seed, depth) for seed in range(SEEDS)]
    assert sum(right for right, _ in tallies) > SEEDS
    assert sum(preempted for _, preempted in tallies) > 0
