"""The measured speed of an engine, and the waits of its requests."""

import pytest

from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.request import GenerationRequest, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.throughput import SECOND_NS
from runtime.kv.cache_kinds import Full, Sliding
from runtime.kv.cache_manager import KVCacheManager
from tests.unit.runtime.engine.fake_runner import VOCABULARY, PretendRunner


class Clock:
    """Each step of the fake device takes a second."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def step(self) -> None:
        self.now += SECOND_NS


def make_engine(clock: Clock, *, slots: int = 4, depth: int = 1) -> Engine:
    return Engine(
        Scheduler(KVCacheManager([Full()], [400], page_tokens=4), slots=slots, step_tokens=16),
        PretendRunner(clock.step),
        token_bytes=lambda token: b"x",
        limits=EngineLimits(context_tokens=200, vocab_size=VOCABULARY, max_live=8, slots=8),
        depth=depth,
        clock=clock,
    )


def ask(engine: Engine, clock: Clock, name: str, tokens: int, answer: int = 1) -> None:
    prompt = tuple((7 * i + ord(name[0])) % VOCABULARY for i in range(tokens))
    engine.add(
        GenerationRequest(name, prompt, StopRules(answer)), lambda _: None, arrived=clock.now
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_the_speed_is_that_of_prompts_under_load(depth: int) -> None:
    clock = Clock()
    engine = make_engine(clock, depth=depth)
    ask(engine, clock, "a", 100)
    assert engine.statistics().tokens_per_s is None
    while engine.step():
        pass
    statistics = engine.statistics()
    assert statistics.tokens_per_s == pytest.approx(16, rel=0.01)
    assert statistics.computed_tokens_total == 100


def test_small_steps_do_not_count_for_the_speed() -> None:
    clock = Clock()
    engine = make_engine(clock)
    ask(engine, clock, "a", 7, answer=9)
    while engine.step():
        pass
    assert engine.statistics().tokens_per_s is None


def test_sampled_tokens_slow_prompts_down_and_do_not_count() -> None:
    clock = Clock()
    engine = make_engine(clock)
    ask(engine, clock, "a", 8, answer=40)
    engine.step()
    before = engine.statistics().computed_tokens_total
    ask(engine, clock, "b", 150)
    for _ in range(8):
        engine.step()
    statistics = engine.statistics()
    assert statistics.computed_tokens_total - before == 8 * 15
    assert 14 <= (statistics.tokens_per_s or 0) <= 15
    assert statistics.queued_tokens == 150 - 8 * 15
    engine.abort("a")
    engine.abort("b")


def test_cached_prompt_tokens_do_not_count_as_computed() -> None:
    clock = Clock()
    engine = make_engine(clock)
    for _ in range(2):
        ask(engine, clock, "same", 100)
        while engine.step():
            pass
    statistics = engine.statistics()
    assert statistics.cached_tokens_total > 90
    assert statistics.computed_tokens_total < 110


def test_each_request_has_one_first_token() -> None:
    clock = Clock()
    engine = make_engine(clock, slots=1)
    ask(engine, clock, "a", 16, answer=10)
    ask(engine, clock, "b", 32)
    while engine.step():
        pass
    statistics = engine.statistics()
    assert statistics.first_tokens_total == 2


def test_occupancy_is_that_of_the_fullest_group() -> None:
    cache_manager = KVCacheManager([Full(), Sliding(4)], [10, 40], page_tokens=4)
    scheduler = Scheduler(cache_manager, slots=1, step_tokens=64)
    scheduler.add(GenerationRequest("a", tuple(range(20)), StopRules(1)))
    scheduler.plan()
    assert cache_manager.occupancy == 0.5
