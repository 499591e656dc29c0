"""Work that takes its time: joined, followed, and given up when nobody follows it."""

import threading
import time

import pytest

from model_zoo.sources.pull import PullProgress
from runtime.errors import ModelNotFoundError, OverloadedError, SourceError
from serve_app.on_demand.operations import Operations
from tests.patience import HANG_S, wait_until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def operations(clock):
    made = Operations(lease_s=15.0, most_at_once=2, clock=clock)
    yield made
    made.close()


def test_a_job_is_joined_by_its_key_and_told_from_where_one_has_got_to(operations):
    may_end = threading.Event()

    def work(progress) -> None:
        progress(PullProgress("one"))
        for done in range(3):
            progress(PullProgress("two", "sha256:x", 2, done))
        assert may_end.wait(HANG_S)
        progress(PullProgress("three"))

    operation = operations.begin("a", work)
    assert operations.begin("a", work) == operation != operations.begin("b", lambda progress: None)
    wait_until(lambda: len(operations.follow(operation, 0).steps) == 2)
    account = operations.follow(operation, 0)
    assert [step.status for step in account.steps] == ["one", "two"] and not account.done
    assert account.steps[1].completed == 2
    may_end.set()
    wait_until(lambda: operations.follow(operation, 2).done)
    account = operations.follow(operation, 2)
    assert (account.first, [step.status for step in account.steps]) == (1, ["two", "three"])


def test_what_a_job_fails_with_is_told_to_who_follows(operations):
    def work(progress) -> None:
        raise SourceError("it is not there")

    operation = operations.begin("a", work)

    def failed() -> bool:
        try:
            return operations.follow(operation, 0).done
        except SourceError as error:
            assert str(error) == "it is not there"
            return True

    wait_until(failed)
    with pytest.raises(ModelNotFoundError, match="is not known"):
        operations.follow("nobody", 0)


def test_a_job_that_nobody_follows_ends_and_one_that_is_followed_goes_on(operations, clock):
    ended: list[str] = []

    def work_of(name: str):
        def work(progress) -> None:
            try:
                while True:
                    progress(PullProgress(name))
                    time.sleep(0.01)
            finally:
                ended.append(name)

        return work

    operations.begin("left", work_of("left"))
    followed = operations.begin("followed", work_of("followed"))

    def only_one_ended() -> bool:
        clock.now += 1.0
        operations.follow(followed, 0)
        return ended == ["left"]

    wait_until(only_one_ended)


def test_only_so_many_are_at_work_at_once(operations):
    may_end = threading.Event()
    for key in ("a", "b"):
        operations.begin(key, lambda progress: may_end.wait(HANG_S))
    with pytest.raises(OverloadedError, match="at work already"):
        operations.begin("c", lambda progress: None)
    may_end.set()
