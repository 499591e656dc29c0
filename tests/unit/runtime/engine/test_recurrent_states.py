"""States of sequences: the cache kind, checkpoints, and random schedules on a fake device.

The device runs launched plans late. A page must hold just what the sequence's own tokens before the
step make of it, whatever was preempted, ended, copied or handed on in between, and a sequence of
the same salt must have computed it.
"""

import random
from collections import Counter, deque
from copy import copy
from dataclasses import replace

import pytest

from runtime.engine.request import GenerationRequest, Sampled, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence, SequenceState
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_kinds import CacheKind, Full, Sliding
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.checkpoints import CheckpointRules
from runtime.kv.host_store import HostPages, TransferCosts
from runtime.kv.page_group import CopyKind, PageCopy
from runtime.kv.states import Recurrent, StateCache
from tests.unit.runtime.engine.test_schedule_simulation import random_host_pages

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


RULES = CheckpointRules(margin=3, least=8, sparse=32, spacing=8)


def managed(kinds: list[CacheKind], *, states: int = 8, pages: int = 20) -> KVCacheManager:
    counts = [states if kind.by_sequence else pages for kind in kinds]
    return KVCacheManager(kinds, counts, page_tokens=4, checkpoint_rules=RULES)


def sequence_of(tokens: range | list[int], salt: bytes = b"") -> Sequence:
    request = GenerationRequest("a", tuple(tokens), StopRules(40), cache_salt=salt)
    return Sequence(request, list(tokens))


def computed(manager: KVCacheManager, sequence: Sequence, *, answer: int = 0) -> list[int]:
    """Computes a sequence as a scheduler does, one step at a time: the ends of the chunks."""
    sequence.confirmed, _ = manager.adopt(sequence)
    ends = []
    while len(sequence.tokens) <= len(sequence.request.prompt) + answer:
        start = sequence.confirmed
        end = manager.chunk_end(sequence, start, len(sequence.tokens))
        assert manager.reserve(sequence, end) is not None
        manager.checkpoint(sequence, start)
        if end == len(sequence.tokens):
            sequence.tokens.append(7)
        sequence.confirmed = end
        manager.publish(sequence)
        manager.trim(sequence)
        ends.append(end)
    return ends


KINDS = {"hybrid": [Full(), Recurrent()], "two": [Recurrent(), Full(), Recurrent(), Sliding(9)]}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_second_turn_starts_at_the_end_of_the_first_prompt_or_of_its_answer(kinds) -> None:
    manager = managed(kinds)
    first = sequence_of(range(30))
    assert computed(manager, first, answer=15) == [24, *range(30, 46)]
    manager.release(first)
    # The last boundary in the answer, and the one before the end of the prompt.
    for turn, cached in (([*first.tokens, 99], 40), ([*range(28), 99], 24), ([*range(23)], 0)):
        assert manager.cached_prefix(sequence_of(turn)) == cached
    manager.check_idle()


def test_pages_without_a_checkpoint_are_no_prefix_and_vice_versa() -> None:
    first, again = sequence_of(range(30)), sequence_of([*range(29), 99])
    roomy = managed([Full(), Recurrent()])
    computed(roomy, first)
    assert roomy.cached_prefix(again) == 24
    roomy.release(first)
    other = sequence_of(range(100, 177))
    assert roomy.reserve(other, 77) is not None  # all pages but the first of `first`
    assert roomy.cached_prefix(again) == 0
    assert roomy.checkpoints is not None and roomy.checkpoints.held == 0
    roomy.release(other)
    roomy.check_idle()
    alone = managed([Full(), Recurrent()], states=1)
    computed(alone, first := sequence_of(range(30)))
    assert alone.cached_prefix(again) == 0, "there was no page for a checkpoint"
    alone.release(first)
    alone.check_idle()


@pytest.mark.parametrize(("states", "cached"), [(2, 0), (3, 24)])
def test_a_checkpoint_in_the_last_page_is_evicted_and_not_used(states: int, cached: int) -> None:
    """The sequence that would use it needs a page for its own state."""
    manager = managed([Full(), Recurrent()], states=states)
    first, again = sequence_of(range(30)), sequence_of([*range(29), 99])
    computed(manager, first)
    assert manager.adopt(again)[0] == cached
    assert manager.reserve(again, 30) is not None
    for each in (first, again):
        manager.release(each)
    manager.check_idle()


def test_pages_that_were_computed_again_are_not_evicted_before_those_that_follow_them() -> None:
    manager = managed([Full(), Recurrent()], pages=13)
    # The second starts at 28 and computes the eighth page again; the third takes one cached page.
    for prompt in (range(34), range(40), range(500, 515)):
        computed(manager, one := sequence_of(prompt))
        manager.release(one)
    assert manager.cached_prefix(sequence_of(range(41))) == 36
    manager.check_idle()


def test_where_prompts_diverge_the_second_leaves_a_checkpoint_for_the_third() -> None:
    manager, system = managed([Full(), Recurrent()]), list(range(22))
    ends = []
    for number in (100, 200, 300):
        ends.append(computed(manager, one := sequence_of(system + list(range(number, number + 9)))))
        manager.release(one)
    assert ends == [[28, 31], [20, 28, 31], [28, 31]]
    assert one.confirmed == 31 and manager.cached_prefix(sequence_of([*system, 1])) == 20


def test_another_salt_finds_neither_pages_nor_checkpoints_and_takes_as_many_steps() -> None:
    """Nor does the router take such a model for one without a prefix cache."""
    manager = managed([Full(), Recurrent()])
    assert manager.cacheable_tokens == 80
    ends = [computed(manager, sequence_of(range(30), salt)) for salt in (b"a", b"b", b"a")]
    assert ends == [[24, 30], [24, 30], [30]]


def test_no_more_states_are_kept_than_there_are_pages_and_the_oldest_go_first() -> None:
    manager = managed([Full(), Recurrent()], states=3, pages=60)
    prompts = [list(range(number, number + 20)) for number in (100, 200, 300, 400)]
    for prompt in prompts:
        computed(manager, one := sequence_of(prompt))
        manager.release(one)
    assert [manager.cached_prefix(sequence_of(prompt)) for prompt in prompts] == [0, 0, 16, 16]
    assert manager.checkpoints is not None
    assert (manager.checkpoints.held, manager.checkpoints.taken, manager.checkpoints.hits) == (
        2,
        4,
        0,
    )


@pytest.mark.parametrize("host", [0, 2])
def test_a_prefix_counts_as_cached_no_longer_than_its_checkpoint(host: int) -> None:
    kinds = [Full(), Recurrent()]
    manager = KVCacheManager(
        kinds,
        [60, 3],
        page_tokens=4,
        checkpoint_rules=RULES,
        host_pages=HostPages([host] * 2, [1] * 2, TransferCosts(1e9)),
    )
    prompts = [list(range(number, number + 20)) for number in range(100, 1000, 100)]
    for prompt in prompts:
        computed(manager, one := sequence_of(prompt))
        manager.release(one)
        # Each prompt leaves one checkpoint.
        assert manager.cacheable_tokens == 20 * (3 + host)
    manager.reserve(sequence_of([1]), 1)
    assert manager.cacheable_tokens == 20 * (2 + host)
    cached = [manager.cached_prefix(sequence_of(prompt)) > 0 for prompt in prompts]
    assert cached == [False] * (7 - host) + [True] * (2 + host)


def test_checkpoints_that_replace_another_do_not_shorten_the_time_for_which_prefixes_stay() -> None:
    manager = managed([Full(), Recurrent()], states=3, pages=600)
    assert manager.cacheable_tokens == 2400
    for number in (100, 200):
        computed(manager, one := sequence_of(range(number, number + 20)), answer=60)
        manager.release(one)
        # One checkpoint in the prompt, and the last one in the answer.
        assert manager.cacheable_tokens == 3 * 80 // 2


def test_the_state_is_copied_from_the_checkpoint_and_to_it_on_all_groups() -> None:
    manager = managed([Recurrent(), Full(), Recurrent()])
    computed(manager, first := sequence_of(range(30)))
    manager.release(first)
    second = sequence_of([*range(26), 99])
    kept = manager.take_copies()
    assert kept == tuple(PageCopy(n, kept[0].source, kept[0].target) for n in (0, 2))
    length, _ = manager.adopt(second)
    grants = manager.reserve(second, 27)
    assert length == 24 and grants is not None
    own = next(grant.page for grant in grants if grant.group == 0)
    assert manager.take_copies() == tuple(PageCopy(n, kept[0].target, own) for n in (0, 2))
    second.confirmed, second.tokens = 32, [*range(40)]
    manager.checkpoint(second, 32)
    copies = manager.take_copies()
    assert copies == tuple(PageCopy(n, own, copies[0].target) for n in (0, 2))
    manager.checkpoint(second, 34)
    assert manager.take_copies() == ()
    manager.release(second)  # before the copy was confirmed
    manager.check_idle()


@pytest.mark.parametrize(
    ("length", "begin", "shared", "most", "positions"),
    [
        (10, 0, 0, 40, []),  # too little to spare
        (60, 0, 0, 40, [32, 56]),
        (60, 48, 56, 40, [56]),
        (60, 52, 52, 40, []),
        (60, 12, 28, 40, [28, 32, 56]),
        (59, 12, 16, 40, [32, 56]),
        (300, 0, 0, 8, [148, 296]),  # two sparse ones of eight
    ],
)
def test_checkpoints_in_prompts_are_at_the_expected_positions(
    length, begin, shared, most, positions
) -> None:
    found = RULES.in_prompt(length, begin=begin, shared=shared, page_tokens=4, most=most)
    assert found == positions


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
    """Pages of states: the number of their tokens, what those have made of it, and for which salt.
    Pages of positions: the token of each cell, and the salt."""

    def __init__(self, kinds: list[CacheKind], pages: list[int], size: int, slots: int) -> None:
        self.kinds, self.size = kinds, size
        self.pages: list[list] = [
            [(-1, -1, b"") if kind.by_sequence else [(-1, b"")] * size for _ in range(count)]
            for kind, count in zip(kinds, pages, strict=True)
        ]
        self.host: list[dict[int, object]] = [{} for _ in kinds]
        self.tables: list[list[dict[int, int]]] = [[{} for _ in range(slots)] for _ in kinds]
        self.last = [-1] * slots

    def execute(self, plan: StepPlan) -> tuple[Sampled | None, ...]:
        for write in plan.page_writes:
            self.tables[write.group][write.slot][write.index] = write.page
        for group, source, target, kind, _ in plan.page_copies:
            sources = self.host if kind is CopyKind.FROM_HOST else self.pages
            targets = self.host if kind is CopyKind.TO_HOST else self.pages
            targets[group][target] = copy(sources[group][source])
        for number, kind in enumerate(self.kinds):
            if kind.by_sequence:
                written = [self.tables[number][chunk.slot][0] for chunk in plan.chunks]
                assert len(set(written)) == len(written), "two sequences have one page"
        return tuple(map(self._advance, plan.chunks))

    def _advance(self, chunk) -> Sampled | None:
        tokens = [self.last[chunk.slot]] if chunk.feedback else list(chunk.known)
        states = {
            self._advance_state(number, chunk, tokens)
            for number, kind in enumerate(self.kinds)
            if kind.by_sequence
        }
        for number, kind in enumerate(self.kinds):
            if not kind.by_sequence:
                self._fill(number, chunk, tokens)
        (state,) = states
        if chunk.samples:
            self.last[chunk.slot] = state % VOCABULARY
        return Sampled(state % VOCABULARY) if chunk.samples else None

    def _advance_state(self, number: int, chunk, tokens: list[int]) -> int:
        page, own = self.tables[number][chunk.slot][0], chunk.sequence.cache_salt
        length, state, salt = self.pages[number][page] if chunk.start else (0, 0, own)
        assert length == chunk.start, "the state is that of another length"
        assert salt == own, "the state is that of another salt"
        for token in tokens:
            state = grown(state, token)
        self.pages[number][page] = (chunk.start + chunk.length, state, own)
        return state

    def _fill(self, number: int, chunk, tokens: list[int]) -> None:
        """Also checks that the rows see the sequence's own tokens, as far as they are known."""
        table, end = self.tables[number][chunk.slot], chunk.start + chunk.length
        salt = chunk.sequence.cache_salt
        for position, token in enumerate(tokens, chunk.start):
            self.pages[number][table[position // self.size]][position % self.size] = (token, salt)
        begins, ends = self.kinds[number].seen(chunk.start, end)
        for position in range(min(begins), min(max(ends), len(chunk.sequence.tokens))):
            cell = self.pages[number][table[position // self.size]][position % self.size]
            assert cell == (chunk.sequence.tokens[position], salt)


def random_request(r: random.Random, number: int, base: tuple[int, ...]) -> GenerationRequest:
    length = r.randint(1, 24)
    cut = r.randint(0, length)
    own = tuple(r.randrange(1, VOCABULARY) for _ in range(length - cut))
    ends = frozenset([r.randrange(VOCABULARY)]) if r.random() < 0.7 else frozenset()
    stop = StopRules(max_tokens=r.randint(1, LONGEST - length), end_tokens=ends)
    return GenerationRequest(str(number), base[:cut] + own, stop)


def follow_up(
    r: random.Random, first: GenerationRequest, second: GenerationRequest
) -> GenerationRequest:
    """The first one's conversation goes on with the second one's prompt."""
    said = answer_alone(first)
    prompt = (*said[: r.randint(len(first.prompt), len(said))], *second.prompt)[: LONGEST - 2]
    return replace(second, prompt=prompt, stop=StopRules(r.randint(1, LONGEST - len(prompt))))


def requests_of(r: random.Random) -> list[GenerationRequest]:
    base = tuple(r.randrange(1, VOCABULARY) for _ in range(24))
    made: list[GenerationRequest] = []
    for number in range(r.randint(3, 14)):
        request = random_request(r, number, base)
        made.append(follow_up(r, r.choice(made), request) if made and r.random() < 0.4 else request)
    return [replace(request, cache_salt=r.choice([b"", b"a"])) for request in made]


def trial(seed: int, depth: int, tally: Counter[str]) -> None:
    r = random.Random(seed)
    size, slots, budget = r.choice([2, 4]), r.choice([2, 4, 6]), r.choice([8, 12, 20])
    kinds = [Full(), Recurrent(), *([Sliding(5)] if r.random() < 0.3 else [])]
    kinds += [Recurrent()] if r.random() < 0.3 else []
    r.shuffle(kinds)
    few, states = LONGEST // size + 1, r.randint(1, 3 * slots)
    pages = [states if kind.by_sequence else r.randint(few, 3 * few) for kind in kinds]
    rules = CheckpointRules(
        r.choice([1, 3]), least=r.choice([2, 6]), sparse=r.choice([6, 12]), spacing=r.choice([4, 8])
    )
    cache_manager = KVCacheManager(
        kinds,
        pages,
        page_tokens=size,
        checkpoint_rules=rules,
        host_pages=random_host_pages(r, kinds) if r.random() < 0.5 else None,
    )
    scheduler = Scheduler(cache_manager, slots=slots, step_tokens=budget)
    device = PretendDevice(kinds, pages, size, slots)
    todo = requests_of(r)
    sequences, aborted, in_flight = [], set(), deque()
    while todo or scheduler.running or scheduler.waiting or in_flight:
        while todo and r.random() < 0.5:
            sequences.append(scheduler.add(todo.pop(0)))
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
            list(scheduler.retire(oldest, device.execute(oldest)))
    finished = [sequence for sequence in sequences if sequence not in aborted]
    for sequence in finished:
        assert sequence.tokens == answer_alone(sequence.request), (seed, depth)
    cache_manager.check_idle()
    assert cache_manager.checkpoints is not None
    tally.update(
        finished=len(finished),
        preempted=scheduler.preemptions,
        cached=sum(sequence.cached for sequence in finished),
        taken=cache_manager.checkpoints.taken,
        hits=cache_manager.checkpoints.hits,
        restored=cache_manager.host_store.restored if cache_manager.host_store else 0,
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_sequence_gets_the_tokens_it_gets_alone(depth: int) -> None:
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        trial(seed, depth, tally)
    assert min(tally["finished"], tally["cached"], tally["taken"], tally["hits"]) > SEEDS, tally
    assert tally["preempted"] > 0 and tally["restored"] > SEEDS // 4


def test_a_stream_admitted_where_a_chunk_ends_at_a_checkpoint_has_a_row_in_each_step() -> None:
    manager = managed([Full(), Recurrent()], states=20, pages=60)
    scheduler = Scheduler(manager, slots=2, step_tokens=24)
    scheduler.add(GenerationRequest("prompt", tuple(range(100)), StopRules(9)))
    found = []
    for number in range(6):
        if number == 1:
            scheduler.add(GenerationRequest("stream", (5, 6), StopRules(9)))
        plan = scheduler.plan()
        assert plan is not None
        found.append([chunk.length for chunk in plan.chunks])
        list(scheduler.retire(plan, tuple(Sampled(7) if c.samples else None for c in plan.chunks)))
    assert found == [[24], [16, 2], [1, 23], [1, 17], [1, 16], [1, 4]]
