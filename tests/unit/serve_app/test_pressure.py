"""What a replica bears, as shares of the targets."""

from dataclasses import replace

import pytest

from serve_app.autoscaling.load_metrics import (
    Backlog,
    Pressure,
    Report,
    Speeds,
    Targets,
    active_at,
    arriving,
    encoding,
    late,
    pressure,
)

TARGETS = Targets(queue_s=5.0, ttft_s=10.0, sequence_occupancy=0.5, kv_occupancy=0.8, load=0.5)
IDLE = Report(100.0, slots=16)


def history(*reports, every_s=2.0):
    return tuple(replace(report, at=every_s * i) for i, report in enumerate(reports))


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (IDLE, Pressure()),
        (replace(IDLE, queued_tokens=5000, tokens_per_s=1000), Pressure(prompts=1.0)),
        (replace(IDLE, running=8), Pressure(sequences=1.0)),
        (replace(IDLE, running=4, kv_occupancy=0.8), Pressure(sequences=0.5, memory=1.0)),
        (replace(IDLE, queued_images=30), Pressure(images=2.0)),
    ],
)
def test_one_is_where_a_replica_just_meets_a_target(report, expected):
    assert pressure(report, Speeds(images_per_s=3.0), TARGETS) == expected


def test_those_that_wait_will_need_as_many_pages_as_those_that_run():
    full = replace(IDLE, running=4, waiting=4, kv_occupancy=0.8)
    assert pressure(full, Speeds(), TARGETS).memory == 2.0


def test_a_replica_that_has_not_measured_its_speed_is_as_fast_as_the_others():
    report = replace(IDLE, queued_tokens=5000)
    assert pressure(report, Speeds(tokens_per_s=500), TARGETS).prompts == 2.0
    assert pressure(report, Speeds(), TARGETS).prompts == 0.0


def test_what_is_not_to_count_of_a_backlog_does_not():
    report = replace(IDLE, running=8, waiting=8, queued_tokens=9000, tokens_per_s=1000)
    less = pressure(report, Speeds(), TARGETS, without=Backlog(tokens=4000, requests=8))
    assert less == Pressure(prompts=1.0, sequences=1.0)


def test_what_arrives_is_told_by_what_was_computed_and_what_queues():
    first = replace(IDLE, tokens_per_s=1000, computed_tokens_total=500, queued_tokens=1500)
    last = replace(first, computed_tokens_total=4500, queued_tokens=3500)
    assert arriving(history(first, last, every_s=12.0), Speeds(), TARGETS) == 1.0


def test_a_burst_does_not_count_as_a_stream_that_goes_on():
    burst = replace(IDLE, tokens_per_s=1000, queued_tokens=20_000)
    alone = arriving(history(IDLE, burst, every_s=0.1), Speeds(), TARGETS)
    assert alone == pressure(burst, Speeds(), TARGETS).prompts


def test_prompts_found_in_the_prefix_cache_are_no_negative_load():
    first = replace(IDLE, tokens_per_s=1000, queued_tokens=4000)
    assert arriving(history(first, replace(first, queued_tokens=0)), Speeds(), TARGETS) == 0.0


@pytest.mark.parametrize(
    ("ttft_s", "queue_s", "replicas"),
    [
        (9.0, 8.0, 0.0),  # the target is met
        (30.0, 2.0, 0.0),  # long prompts, which more replicas do not make shorter
        (12.0, 8.0, 2 * 8 / 6),
        (40.0, 39.0, 4.0),  # doubled at most
    ],
)
def test_time_to_first_token_counts_as_far_as_it_was_waiting(ttft_s, queue_s, replicas):
    told = replace(IDLE, ttft_s=ttft_s, ttft_queue_s=queue_s, first_tokens_total=7)
    both = {"a": history(IDLE, told), "b": history(IDLE, told)}
    assert late(both, TARGETS) == pytest.approx(replicas)


def test_first_tokens_of_long_ago_count_no_more():
    told = replace(IDLE, ttft_s=40, ttft_queue_s=39, first_tokens_total=7)
    assert late({"a": history(told, told)}, TARGETS) == 0.0


def test_encoding_speed_is_what_was_encoded_while_there_was_more():
    busy = [replace(IDLE, queued_images=9, encoded_images_total=n) for n in (0, 6, 10)]
    done = replace(IDLE, encoded_images_total=19)
    assert encoding(history(*busy, done, done), 0.0) == (10, 4.0)
    assert encoding(history(*busy, done, done), 2.0) == (4, 2.0)


def test_work_between_two_reports_is_noticed():
    before = replace(IDLE, steps_total=3)
    after = replace(IDLE, steps_total=9)
    assert active_at(history(before, before)) is None
    assert active_at(history(before, after, after)) == 2.0
    assert active_at(history(before, replace(after, running=1))) == 2.0
