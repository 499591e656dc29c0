"""Drafts are the tokens that the draft model draws alone, computed from scratch.

Random schedules, as in test_schedule_simulation.py, on two pretend devices. The draft model's
device has few pages, and draws the same tokens as the other one except for some.
"""

import random
from dataclasses import dataclass

import pytest

from runtime.engine.drafter import Drafter, DraftLimits
from runtime.engine.request import (
    DrawFailure,
    GenerationRequest,
    Result,
    SamplingParams,
    StopRules,
)
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence
from runtime.engine.speculation import Speculation
from runtime.engine.step_plan import Chunk, PageWrite, StepPlan
from runtime.kv.cache_kinds import CacheKind, Chunked, Full, Sliding
from runtime.kv.cache_manager import KVCacheManager
from tests.unit.runtime.engine.pretend_device import VOCABULARY, Launched, PretendDevice, mix
from tests.unit.runtime.engine.test_schedule_simulation import (
    LONGEST,
    PretendEncoder,
    Tally,
    answer_alone,
    drive,
    last_row,
    random_requests,
)
from tests.unit.runtime.engine.test_scheduler import results

SEEDS, MOST = 35, 4


@dataclass
class Drafts:
    made: int = 0
    tokens: int = 0
    left_out: int = 0
    accepted: int = 0
    wrong: int = 0
    preemptions: int = 0
    shifts: int = 0


def drawn_otherwise(x: int) -> int:
    """As the other model does, but in one of four cases."""
    return (x + (mix(4, x) % 4 == 0)) % VOCABULARY


class DraftDevice(PretendDevice):
    """That of the draft model. `asked`: the requests that it drafts for."""

    def __init__(
        self,
        kinds: list[CacheKind],
        pages: list[int],
        size: int,
        slots: int,
        asked: list[GenerationRequest],
    ) -> None:
        super().__init__(kinds, pages, size, slots)
        self.asked = {request.id: request for request in asked}
        self.flying: list[Launched] = []
        self.most_rows = self.most_draws = 0

    def _drawn(self, x: int, allowed: int | None) -> int:
        return drawn_otherwise(x)

    def _request(self, chunk: Chunk) -> GenerationRequest:
        return self.asked[chunk.sequence.request.id]

    def launch(self, plan: StepPlan) -> Launched:
        self.most_rows = max(self.most_rows, sum(chunk.length for chunk in plan.chunks))
        self.most_draws = max(self.most_draws, sum(chunk.samples for chunk in plan.chunks))
        self.flying.append(super().launch(plan))
        return self.flying[-1]

    def collect(self, launched: Launched) -> tuple[Result, ...]:
        assert self.flying.pop(0) is launched
        return super().collect(launched)


def alone(tokens: list[int], count: int, kinds: list[CacheKind]) -> tuple[int, ...]:
    tokens, begin = list(tokens), len(tokens)
    stored: list[list[int]] = [[] for _ in kinds]
    while len(tokens) < begin + count:
        tokens.append(drawn_otherwise(last_row(kinds, (), tokens, stored)))
    return tuple(tokens[begin:])


class RandomDrafts(Speculation):
    """Drafts of any length, at any time; some are not proposed, or not whole."""

    def __init__(self, r, drafter: Drafter, kinds, *, draws: int, drafts: Drafts) -> None:
        self.r, self.drafter, self.kinds, self.draws, self.drafts = r, drafter, kinds, draws, drafts
        self.eager = r.choice([0.1, 0.5, 0.9])

    def observe(self, plan: StepPlan, duration_ns: int) -> None:
        pass

    def propose(self, running, *, joining: int) -> None:
        self.drafter.keep(running)
        wanted: dict[Sequence, int] = {}
        room = self.draws - len(running) - joining
        for sequence in running:
            sequence.propose(())
            if not sequence.may_propose or self.r.random() > self.eager:
                continue
            if sequence.pending:
                sequence.waits_to_propose = True
                continue
            most = min(
                MOST, self.drafter.room(sequence), sequence.most_tokens - sequence.length - 1
            )
            if most > 0:
                wanted[sequence] = self.r.randint(1, most)
        found = self.drafter.draft(wanted)
        self.drafts.left_out += len(wanted) - len(found)
        for sequence, draft in found.items():
            assert draft == alone(sequence.tokens, wanted[sequence], self.kinds)
            kept = draft[: self.r.choice([0, 1, len(draft), len(draft)])][: max(0, room)]
            sequence.propose(kept, drafted=True)
            room -= len(kept)
            self.drafts.made += 1
            self.drafts.tokens += len(draft)


def trial(seed: int, depth: int, drafts: Drafts) -> None:
    r = random.Random(seed)
    size, slots, budget = r.choice([2, 4]), r.choice([2, 4]), r.choice([8, 12])
    kinds: list[CacheKind] = [Full(), Sliding(r.randint(2, 9)), Chunked(r.choice([4, 8]))]
    kinds = r.sample(kinds, r.randint(1, 3))
    own, less = ([LONGEST // size + n for _ in kinds] for n in (r.randint(2, 30), r.randint(2, 9)))
    manager = KVCacheManager(kinds, own, page_tokens=size, moves_keys=r.random() < 0.5)
    drafting = KVCacheManager(kinds, less, page_tokens=size, prefix_cache=r.random() < 0.7)
    draws = slots + r.randint(0, budget - slots)
    limits = DraftLimits(
        step_tokens=r.choice([slots, budget]),
        draws=slots,
        context_tokens=r.choice([LONGEST, 25]),
        written_tokens=r.choice([MOST + 2, MOST + 2, 1]),
        vocab_size=VOCABULARY,
        target_vocab_size=VOCABULARY,
        depth=r.choice([1, 2]),
    )
    todo = random_requests(r, manager, kinds, most=10, moving=True)
    device = DraftDevice(kinds, less, size, slots, todo)
    drafter = Drafter(device, drafting, limits, clock=lambda: 0)
    speculation = RandomDrafts(r, drafter, kinds, draws=draws, drafts=drafts)
    scheduler = Scheduler(manager, slots=slots, step_tokens=budget, speculation=speculation)
    encoder = PretendEncoder(r, 3, Tally())
    target = PretendDevice(kinds, own, size, slots)
    answers, aborted = drive(r, scheduler, target, encoder, todo, depth, draws)
    for sequence, answer in answers.items():
        if sequence not in aborted:
            moved = sequence.moving_cut is not None
            assert tuple(answer) == answer_alone(sequence.request, kinds, moves=moved), seed
    assert device.most_draws <= limits.draws and device.most_rows <= limits.step_tokens
    assert not device.flying
    drafting.check_idle()
    drafts.accepted += scheduler.accepted_drafts
    drafts.wrong += scheduler.drafted_tokens - scheduler.accepted_drafts
    drafts.preemptions += scheduler.preemptions
    drafts.shifts += scheduler.shifts


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_are_those_of_the_model_alone(depth: int) -> None:
    drafts = Drafts()
    for seed in range(SEEDS):
        trial(seed, depth, drafts)
    assert drafts.made > 8 * SEEDS and drafts.tokens > 1.5 * drafts.made
    assert min(drafts.accepted, drafts.wrong) > 3 * SEEDS
    assert min(drafts.left_out, drafts.shifts) > SEEDS and drafts.preemptions > SEEDS // 10


class LoadedSampling:
    """A runner that records the sampling parameters that steps load, and their page writes. Drawing
    fails from the draw `fails_at` on."""

    def __init__(self, *, fails_at: int = 10**6) -> None:
        self.loaded: list[SamplingParams] = []
        self.writes: list[tuple[PageWrite, ...]] = []
        self.left = fails_at

    def launch(self, plan: StepPlan) -> StepPlan:
        self.loaded += [load.sampling for load in plan.slot_loads]
        self.writes.append(plan.page_writes)
        return plan

    def collect(self, launched: StepPlan) -> tuple[Result, ...]:
        self.left -= sum(chunk.samples for chunk in launched.chunks)
        failure = DrawFailure("not finite")
        return results(launched) if self.left >= 0 else (failure,) * len(launched.chunks)


def drafter_of(runner: LoadedSampling) -> Drafter:
    """The vocabulary of the draft model has 40 tokens, that of the target 100."""
    limits = DraftLimits(
        step_tokens=8,
        draws=4,
        context_tokens=30,
        written_tokens=6,
        vocab_size=40,
        target_vocab_size=100,
    )
    return Drafter(runner, KVCacheManager([Full()], [9], page_tokens=4), limits)


def running(*tokens: int, **sampling) -> Sequence:
    request = GenerationRequest("a", tokens, StopRules(9), SamplingParams(**sampling))
    return Sequence(request, list(tokens), slot=0)


def test_a_draft_ends_before_a_token_that_cannot_be_sampled() -> None:
    drafter, one = drafter_of(LoadedSampling(fails_at=2)), running(1)
    assert [len(draft) for draft in drafter.draft({one: 4}).values()] == [2]


def test_drafts_end_with_the_context_of_the_draft_model() -> None:
    assert drafter_of(LoadedSampling()).room(running(*range(1, 21))) == 10


def test_page_writes_of_a_sequence_that_has_left_its_slot_are_not_made() -> None:
    """The second one adopts cached pages, but cannot draft."""
    runner = LoadedSampling()
    drafter, known = drafter_of(runner), range(1, 9)
    for last in (9, 40, 10):
        drafter.draft({running(*known, last): 2})
        drafter.keep(())
    places = [(write.slot, write.index) for write in runner.writes[-2]]
    assert len(places) == len(set(places)) > 0


def words(*tokens: int, count: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(4 * count, "little")


def drafted_with(**given) -> SamplingParams | None:
    """The sampling parameters of the draft model; None if it does not draft."""
    runner = LoadedSampling()
    drafter, sequence = drafter_of(runner), running(1, 2, logprobs=1, **given)
    drafts = drafter.draft({sequence: 2})
    assert (sequence in drafts) == (drafter.room(sequence) > 0) == bool(runner.loaded)
    return runner.loaded[0] if runner.loaded else None


@pytest.mark.parametrize(
    ("given", "drafted"),
    [
        ({"logit_bias": ((40, 1.0), (39, 2.0))}, {"logit_bias": ((39, 2.0),)}),
        ({"barred": (99, 5), "barred_until": 4}, {"barred": (5,), "barred_until": 4}),
        ({"bad_words": ((7, 40), (41, 7), (7, 8))}, {"bad_words": ((7, 8),)}),
        ({"allowed": words(3, 39, 40, 99, count=4)}, {"allowed": words(3, 39, count=2)}),
        ({"allowed": words(3, count=1)}, {"allowed": words(3, count=2)}),
    ],
)
def test_tokens_outside_the_vocabulary_of_the_draft_model_are_not_restricted_there(
    given: dict[str, object], drafted: dict[str, object]
) -> None:
    assert drafted_with(**given) == SamplingParams(**drafted)


def test_a_sequence_that_may_draw_only_tokens_that_the_draft_model_lacks_does_not_draft() -> None:
    assert drafted_with(allowed=words(40, 99, count=4)) is None
