"""Limits of tenants, with a clock that the test sets."""

import math

from serve_app.api.limits import Bucket, Limiter, Limits
from tests.virtual_time import Clock


def limiter(clock: Clock, default: Limits, processes: int = 1, **tenants: Limits) -> Limiter:
    return Limiter(default, tenants, processes=processes, clock=clock)


def admitted(limits: Limiter, tenant: str, *, counted: bool = True) -> bool:
    """Whether a request is admitted; it ends at once."""
    _, reached = limits.begin(tenant, counted=counted)
    if reached is None:
        limits.end(tenant)
    return reached is None


def test_a_bucket_refills_continuously_up_to_one_minutes_worth():
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.level == 0
    assert bucket.wait_s(1) == 1
    clock.now_s += 1
    assert bucket.wait_s(1) == 0
    clock.now_s += 1000
    assert bucket.level == 60 and bucket.full_in_s == 0


def test_a_bucket_that_is_overdrawn_refills_from_below_zero():
    clock = Clock()
    bucket = Bucket(600, clock)
    bucket.take(1600)
    assert math.isclose(bucket.wait_s(1), 100.1)
    clock.now_s += 100.1
    assert bucket.wait_s(1) == 0


def test_a_request_after_the_stated_wait_is_admitted():
    clock = Clock()
    for per_minute in (1, 7, 59, 1013):
        bucket = Bucket(per_minute, clock)
        bucket.take(bucket.capacity)
        for _ in range(50):
            clock.now_s += bucket.wait_s(1)
            assert bucket.wait_s(1) == 0
            bucket.take(1)


def test_requests_per_minute_are_admitted_and_then_one_by_one():
    clock = Clock()
    limits = limiter(clock, Limits(requests_per_minute=3))
    assert [admitted(limits, "a") for _ in range(4)] == [True, True, True, False]
    assert admitted(limits, "b"), "another tenant has a budget of its own"
    _, reached = limits.begin("a", counted=True)
    assert reached is not None
    assert (reached.limit, reached.retry_after_s) == ("requests_per_minute", 20)
    clock.now_s += 20
    assert [admitted(limits, "a") for _ in range(2)] == [True, False]


def test_a_refused_request_costs_nothing():
    clock = Clock()
    limits = limiter(clock, Limits(requests_per_minute=60, concurrent_requests=1))
    state, _ = limits.begin("a", counted=True)
    assert not any(admitted(limits, "a") for _ in range(100))
    assert state.requests is not None and state.requests.level == 59


def test_requests_that_are_not_counted_pass_while_the_budgets_are_spent():
    limits = limiter(Clock(), Limits(1, 1))
    state, _ = limits.begin("a", counted=True)
    limits.end("a")
    state.spend(10)
    assert not admitted(limits, "a")
    assert admitted(limits, "a", counted=False)


def test_tokens_are_charged_afterwards_and_refuse_the_next_request():
    clock = Clock()
    limits = limiter(clock, Limits(tokens_per_minute=600))
    state, reached = limits.begin("a", counted=True)
    assert reached is None
    state.spend(900)
    limits.end("a")
    _, reached = limits.begin("a", counted=True)
    assert reached is not None and reached.limit == "tokens_per_minute"
    clock.now_s += reached.retry_after_s
    assert admitted(limits, "a")


def test_concurrent_requests_are_those_that_have_not_ended():
    limits = limiter(Clock(), Limits(concurrent_requests=2))
    for _ in range(2):
        assert limits.begin("a", counted=True)[1] is None
    _, reached = limits.begin("a", counted=False)
    assert reached is not None and reached.limit == "concurrent_requests"
    assert admitted(limits, "b")
    limits.end("a")
    assert admitted(limits, "a")


def test_each_process_has_its_share_and_admits_at_least_one_request():
    whole = Limits(requests_per_minute=90, tokens_per_minute=9000, concurrent_requests=4)
    assert whole.share(3) == Limits(30, 3000, 2)
    limits = limiter(Clock(), Limits(1, 1, 1), processes=4)
    assert [admitted(limits, "a") for _ in range(2)] == [True, False]
    _, reached = limits.begin("a", counted=True)
    assert reached is not None and reached.retry_after_s == 240


def test_named_tenants_have_limits_of_their_own():
    limits = limiter(Clock(), Limits(concurrent_requests=1), a=Limits())
    for _ in range(3):
        assert limits.begin("a", counted=True)[1] is None
    assert limits.begin("b", counted=True)[1] is None
    assert limits.begin("b", counted=True)[1] is not None


def test_clients_that_come_and_go_leave_no_state():
    limits = limiter(Clock(), Limits(concurrent_requests=2))
    for number in range(1000):
        assert admitted(limits, f"192.0.2.{number}")
    assert limits._states == {}
