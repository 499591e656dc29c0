"""The autoscaling metrics of an on-demand process: no idle model hides a full one."""

import pytest

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.autoscaling.load_metrics import (
    METRIC_NAMES,
    LoadShares,
    ScalingMetrics,
    ScalingTargets,
    load_shares,
)
from serve_app.on_demand.pool_load import REFUSED_S, PoolLoad
from tests.virtual_time import Clock

TARGETS = ScalingTargets(queue_s=5.0, sequence_occupancy=1.0, kv_occupancy=1.0)
FULL = EngineStatistics(
    running=4, waiting=8, slots=4, kv_occupancy=0.5, queued_tokens=2000, tokens_per_s=100.0
)
IDLE = EngineStatistics(slots=4, tokens_per_s=900.0)
BUSY = EngineStatistics(
    running=1, slots=4, kv_occupancy=0.1, queued_tokens=500, tokens_per_s=1000.0
)


def metrics(
    *engines: EngineStatistics, load: PoolLoad | None = None, held: int = 0
) -> dict[str, float]:
    return (load or PoolLoad()).metrics(engines, held_requests=held, used_share=0.0)


def shares(*engines: EngineStatistics, held: int = 0) -> LoadShares:
    found = ScalingMetrics(0.0, **metrics(*engines, held=held))
    return load_shares(found, TARGETS, work_per_s=found.work_per_s)


@pytest.mark.parametrize("others", [(), (IDLE,), (BUSY,), (BUSY, IDLE)])
def test_the_load_of_a_process_is_that_of_its_most_loaded_model(others):
    assert shares(FULL) == LoadShares(queue=4.0, sequences=3.0, memory=1.5)
    assert shares(FULL, *others) == pytest.approx(shares(FULL))


def test_each_share_may_come_from_another_model():
    wide = EngineStatistics(running=1, slots=64, kv_occupancy=0.9)
    slow = EngineStatistics(running=1, slots=64, queued_tokens=400, tokens_per_s=10.0)
    assert shares(wide, slow, FULL) == pytest.approx(LoadShares(8.0, 3.0, 1.5))


def test_requests_for_a_model_that_is_being_loaded_take_no_slot_of_others():
    assert metrics(BUSY, held=50)["waiting"] == 50.0
    assert shares(BUSY, held=50) == pytest.approx(shares(BUSY))
    assert shares(held=50) == LoadShares()
    assert ScalingMetrics(0.0, **metrics(held=50)).requests == 50, "the process is not idle"


def test_an_empty_process_reports_no_load():
    assert set(metrics().values()) == {0.0}
    assert set(metrics()) == set(METRIC_NAMES) - {"operations"}


def test_a_model_of_unknown_speed_counts_at_the_speed_of_the_others():
    unknown = EngineStatistics(running=1, slots=4, queued_tokens=700)
    assert shares(unknown).queue == 0.0
    assert metrics(unknown, BUSY)["queued_work"] == 1200.0
    assert shares(unknown, BUSY).queue == pytest.approx(0.1)


def test_each_model_refused_for_lack_of_memory_counts_once_and_for_a_while():
    clock = Clock()
    load = PoolLoad(clock=clock)
    for _ in range(5):
        load.note_refused("big", 0.5)
    load.note_refused("small", 0.25)
    found = metrics(load=load)
    assert (found["model_memory"], found["waiting"]) == (1.75, 2.0)
    clock.now_s += REFUSED_S / 2
    load.note_refused("small", 0.25)
    clock.now_s += REFUSED_S / 2
    assert metrics(load=load)["model_memory"] == 1.25
    clock.now_s += REFUSED_S
    assert metrics(load=load)["model_memory"] == 0.0


def test_totals_include_unloaded_models():
    load = PoolLoad()
    done = EngineStatistics(computed_tokens_total=5, steps_total=8)
    before = metrics(done, done, load=load)
    load.note_unloaded(done)
    assert metrics(done, load=load) == before
    assert (before["work_total"], before["steps_total"]) == (10, 16)
