"""Load shares, throughput and speed of one replica."""

from dataclasses import replace

import pytest

from serve_app.autoscaling.load_metrics import (
    LoadShares,
    ScalingMetrics,
    ScalingTargets,
    load_shares,
    measured_speed,
    throughput_share,
)

TARGETS = ScalingTargets(queue_s=5.0, sequence_occupancy=0.5, kv_occupancy=0.8)
IDLE = ScalingMetrics(100.0, slots=16)


def history(*reports, every_s=2.0):
    return tuple(replace(report, at=every_s * i) for i, report in enumerate(reports))


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (IDLE, LoadShares()),
        (replace(IDLE, queued_work=5000), LoadShares(queue=1.0)),
        (replace(IDLE, running=8), LoadShares(sequences=1.0)),
        (replace(IDLE, running=4, kv_occupancy=0.8), LoadShares(sequences=0.5, memory=1.0)),
        (replace(IDLE, kv_occupancy=0.8, model_memory=1.5), LoadShares(memory=1.5)),
    ],
)
def test_a_share_is_one_where_a_replica_just_meets_the_target(metrics, expected):
    assert load_shares(metrics, TARGETS, work_per_s=1000) == expected


def test_waiting_requests_are_expected_to_need_as_many_pages_as_running_ones():
    full = replace(IDLE, running=4, waiting=4, kv_occupancy=0.8)
    assert load_shares(full, TARGETS, work_per_s=0).memory == 2.0


def test_a_queue_does_not_count_while_no_speed_is_known():
    assert load_shares(replace(IDLE, queued_work=5000), TARGETS, work_per_s=0).queue == 0.0


def test_throughput_is_the_work_done_as_a_share_of_the_speed():
    last = replace(IDLE, work_total=5000)
    assert throughput_share(history(IDLE, last, every_s=10.0), work_per_s=1000) == 0.5
    assert throughput_share(history(IDLE), work_per_s=1000) == 0.0


def test_the_reported_speed_is_preferred():
    assert measured_speed(history(IDLE, replace(IDLE, work_per_s=1000))) == 1000


def test_speed_is_measured_from_work_done_while_more_was_queued():
    busy = [replace(IDLE, queued_work=9, work_total=n) for n in (0, 6, 10)]
    done = replace(IDLE, work_total=19)
    assert measured_speed(history(*busy, done, done)) == 2.5
    assert measured_speed(history(done, done)) == 0.0


def test_work_that_is_longer_than_the_history_has_a_speed_too():
    slow = [replace(IDLE, queued_work=3)] * 5
    assert measured_speed(history(*slow)) == 1 / 8
