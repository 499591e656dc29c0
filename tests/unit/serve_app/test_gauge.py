"""What a process with several models tells autoscaling: no idle model hides one that is full."""

import pytest

from runtime.engine.engine import EngineStatistics
from serve_app.autoscaling.load_metrics import MEASURES, Pressure, Report, Speeds, Targets, pressure
from serve_app.on_demand.pool_load import LACKING_S, RECENT_S, PoolLoad

TARGETS = Targets(queue_s=5.0, sequence_occupancy=1.0, kv_occupancy=1.0)
FULL = EngineStatistics(
    running=4, waiting=8, slots=4, kv_occupancy=0.5, queued_tokens=2000, tokens_per_s=100.0
)
IDLE = EngineStatistics(slots=4, tokens_per_s=900.0)
CALM = EngineStatistics(
    running=1, slots=4, kv_occupancy=0.1, queued_tokens=500, tokens_per_s=1000.0
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def read(gauge: PoolLoad, held: int = 0, **engines: EngineStatistics) -> dict[str, float]:
    return gauge.read(engines, held=held, used=0.0)


def borne(told: dict[str, float]) -> Pressure:
    return pressure(Report(0.0, **told), Speeds(), TARGETS)


@pytest.mark.parametrize("others", [{}, {"b": IDLE}, {"b": CALM}, {"b": CALM, "c": IDLE}])
def test_a_process_bears_what_the_model_bears_that_bears_most(others):
    expected = borne(read(PoolLoad(), a=FULL))
    assert expected == Pressure(prompts=4.0, sequences=3.0, memory=1.5)
    found = borne(read(PoolLoad(), a=FULL, **others))
    for name in ("prompts", "sequences", "memory"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_each_measure_may_be_that_of_another_model():
    wide = EngineStatistics(running=1, slots=64, kv_occupancy=0.9)
    slow = EngineStatistics(running=1, slots=64, queued_tokens=400, tokens_per_s=10.0)
    found = borne(read(PoolLoad(), a=wide, b=slow, c=FULL))
    assert found.memory == pytest.approx(1.5) and found.prompts == pytest.approx(8.0)
    assert found.sequences == pytest.approx(3.0)


def test_whoever_waits_for_a_model_to_be_loaded_waits_but_takes_no_place():
    told = read(PoolLoad(), held=50, a=CALM)
    assert told["waiting"] == 50.0
    assert borne(told).sequences == pytest.approx(borne(read(PoolLoad(), a=CALM)).sequences)
    assert borne(told).memory == pytest.approx(0.1)
    assert borne(read(PoolLoad(), held=50)) == Pressure()
    assert Report(0.0, **read(PoolLoad(), held=50)).requests == 50, "so it is not taken for idle"


def test_an_empty_process_bears_nothing():
    assert set(read(PoolLoad()).values()) == {0.0}
    assert set(read(PoolLoad())) == set(MEASURES)


def test_a_speed_that_one_model_does_not_know_yet_is_left_to_the_others():
    unknown = EngineStatistics(running=1, slots=4, queued_tokens=700)
    assert borne(read(PoolLoad(), a=unknown)).prompts == 0.0
    told = read(PoolLoad(), a=unknown, b=CALM)
    assert told["queued_tokens"] == 1200.0 and borne(told).prompts == pytest.approx(0.1)


def test_what_was_refused_for_want_of_room_counts_for_a_while_and_once():
    clock = Clock()
    gauge = PoolLoad(clock=clock)
    for _ in range(5):
        gauge.note_refused("big", 0.5)
    gauge.note_refused("small", 0.25)
    told = read(gauge)
    assert (told["room_lacking"], told["waiting"]) == (0.75, 2.0)
    assert told["room_used"] == 1.0, "so there was no more"
    clock.now += LACKING_S / 2
    gauge.note_refused("small", 0.25)
    clock.now += LACKING_S / 2
    assert read(gauge)["room_lacking"] == 0.25
    clock.now += LACKING_S
    told = read(gauge)
    assert (told["room_lacking"], told["room_used"]) == (0.0, 0.0)


def test_waits_are_those_of_the_model_whose_queue_is_longest_while_they_are_news():
    clock = Clock()
    gauge = PoolLoad(clock=clock)
    queueing = EngineStatistics(first_tokens_total=3, ttft_s=12.0, ttft_queue_s=11.0)
    slow = EngineStatistics(first_tokens_total=9, ttft_s=30.0, ttft_queue_s=0.5)
    told = read(gauge, a=queueing, b=slow)
    assert (told["ttft_s"], told["ttft_queue_s"]) == (12.0, 11.0)
    clock.now += RECENT_S + 1
    later = EngineStatistics(first_tokens_total=10, ttft_s=30.0, ttft_queue_s=0.5)
    told = read(gauge, a=queueing, b=later)
    assert (told["ttft_s"], told["ttft_queue_s"]) == (30.0, 0.5), "of long ago, and nobody came"
    assert told["first_tokens_total"] == 13.0


def test_totals_never_fall():
    gauge = PoolLoad()
    done = EngineStatistics(
        computed_tokens_total=5, images_encoded_total=6, first_tokens_total=7, steps_total=8
    )
    told = read(gauge, a=done, b=done)
    gauge.note_gone(done)
    assert read(gauge, b=done) == told
    assert [told[name] for name in sorted(told) if name.endswith("_total")] == [10, 12, 14, 16]
