"""What an engine knows of its own speed, and of how long requests have waited."""

import pytest

from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.request import GenerationRequest, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.throughput import SECOND_NS, Throughput
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.spec import Full, Sliding
from tests.unit.runtime.pretend import VOCABULARY, PretendRunner


class Clock:
    """Each step of the pretend device takes a second."""

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
def test_the_speed_is_what_prompts_get_while_they_queue(depth: int) -> None:
    clock = Clock()
    engine = make_engine(clock, depth=depth)
    ask(engine, clock, "a", 100)
    assert engine.statistics().tokens_per_s is None
    while engine.step():
        pass
    statistics = engine.statistics()
    assert statistics.tokens_per_s == pytest.approx(16, rel=0.01)
    assert statistics.computed_tokens_total == 100


def test_steps_with_little_to_do_say_nothing_about_the_speed() -> None:
    clock = Clock()
    engine = make_engine(clock)
    ask(engine, clock, "a", 7, answer=9)
    while engine.step():
        pass
    assert engine.statistics().tokens_per_s is None


def test_answers_that_are_drawn_slow_prompts_down_and_are_none() -> None:
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
    assert statistics.waiting_tokens > statistics.queued_tokens


def test_what_a_prompt_found_in_the_prefix_cache_is_not_computed() -> None:
    clock = Clock()
    engine = make_engine(clock)
    for _ in range(2):
        ask(engine, clock, "same", 100)
        while engine.step():
            pass
    statistics = engine.statistics()
    assert statistics.cached_tokens_total > 90
    assert statistics.computed_tokens_total < 110


def test_the_wait_for_a_place_is_part_of_the_time_to_the_first_token() -> None:
    clock = Clock()
    engine = make_engine(clock, slots=1)
    ask(engine, clock, "a", 16, answer=10)
    ask(engine, clock, "b", 32)
    while engine.step():
        pass
    statistics = engine.statistics()
    assert statistics.first_tokens_total == 2
    assert (statistics.ttft_queue_s, statistics.ttft_s) == (10, 12)


def test_first_tokens_of_long_ago_are_forgotten() -> None:
    pace = Throughput(16)
    pace.begin(0, queue_ns=80 * SECOND_NS, ttft_ns=90 * SECOND_NS)
    pace.begin(29 * SECOND_NS, queue_ns=0, ttft_ns=SECOND_NS)
    assert pace.waits is not None and pace.waits.ttft_s == 90
    pace.begin(31 * SECOND_NS, queue_ns=0, ttft_ns=SECOND_NS)
    assert (pace.waits.ttft_s, pace.waits.queue_s) == (1, 0)


def test_one_in_twenty_may_have_waited_longer() -> None:
    pace = Throughput(16)
    for seconds in [99, 98, *[2] * 38]:
        pace.begin(0, queue_ns=SECOND_NS, ttft_ns=seconds * SECOND_NS)
    assert pace.waits is not None and pace.waits.ttft_s == 98
    pace.begin(0, queue_ns=SECOND_NS, ttft_ns=2 * SECOND_NS)
    assert pace.waits.ttft_s == 2


def test_the_fullest_group_of_pages_is_what_counts() -> None:
    cache_manager = KVCacheManager([Full(), Sliding(4)], [10, 40], page_tokens=4)
    scheduler = Scheduler(cache_manager, slots=1, step_tokens=64)
    scheduler.add(GenerationRequest("a", tuple(range(20)), StopRules(1)))
    scheduler.plan()
    assert cache_manager.occupancy == 0.5
