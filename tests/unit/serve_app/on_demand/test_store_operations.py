"""Long operations: joined, followed, and cancelled when no client follows them."""

import threading
import time

import pytest

from model_zoo.sources.pull import PullProgress
from runtime.errors import ModelNotFoundError, OverloadedError, SourceError
from serve_app.on_demand.store_operations import Operations
from tests.patience import HANG_S, wait_until


@pytest.fixture
def operations(clock):
    made = Operations(lease_s=15.0, max_running=2, clock=clock)
    yield made
    made.close()


def test_operations_of_one_key_are_joined_and_each_client_reads_its_own_steps(operations):
    may_end, runs = threading.Event(), []

    def work(progress) -> None:
        runs.append(1)
        progress(PullProgress("one"))
        for completed in range(3):
            progress(PullProgress("two", "sha256:x", 2, completed))
        assert may_end.wait(HANG_S)
        progress(PullProgress("three"))

    operations.begin("first client", "a", work)
    operations.begin("other key", "b", lambda progress: None)
    wait_until(lambda: operations.follow("first client", 0).count == 2)
    operations.begin("second client", "a", work)
    for client in ("first client", "second client"):
        report = operations.follow(client, 0)
        assert [step.status for step in report.steps] == ["one", "two"] and not report.done
        assert report.steps[1].completed == 2
    may_end.set()
    wait_until(lambda: operations.follow("first client", 0).done)
    report = operations.follow("second client", 1)
    assert [step.status for step in report.steps] == ["two", "three"]
    assert (report.count, report.done, runs) == (3, True, [1])


def test_operations_of_one_name_with_other_contents_are_not_joined(operations):
    may_end, runs = threading.Event(), []

    def work_of(content: str):
        def work(progress) -> None:
            runs.append(content)
            assert may_end.wait(HANG_S)

        return work

    operations.begin("first", "create own", work_of("a"), variant="a")
    operations.begin("second", "create own", work_of("b"), variant="b")
    operations.begin("third", "create own", work_of("b"), variant="b")
    may_end.set()
    wait_until(lambda: operations.follow("third", 0).done and operations.follow("first", 0).done)
    assert sorted(runs) == ["a", "b"]


def test_a_client_that_begins_after_the_end_starts_a_new_operation(operations):
    runs = []
    for client in ("first", "second"):
        operations.begin(client, "a", lambda progress: runs.append(1))
        wait_until(lambda client=client: operations.follow(client, 0).done)
    assert len(runs) == 2
    assert operations.follow("first", 0).done, "its client may not have read the end yet"


def test_followers_get_the_error_of_the_operation(operations):
    def work(progress) -> None:
        raise SourceError("it is not there")

    operations.begin("client", "a", work)

    def failed() -> bool:
        try:
            return operations.follow("client", 0).done
        except SourceError as error:
            assert str(error) == "it is not there"
            return True

    wait_until(failed)
    with pytest.raises(ModelNotFoundError, match="is unknown or has expired"):
        operations.follow("another", 0)


def test_an_operation_without_followers_is_cancelled_and_others_continue(operations, clock):
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

    operations.begin("left", "left", work_of("left"))
    operations.begin("followed", "followed", work_of("followed"))

    def only_one_ended() -> bool:
        clock.now_s += 1.0
        operations.follow("followed", 0)
        return ended == ["left"]

    wait_until(only_one_ended)
    with pytest.raises(OverloadedError, match="no client polled"):
        wait_until(lambda: operations.follow("left", 0).done)


def test_a_client_does_not_join_an_operation_that_is_being_cancelled(operations, clock):
    runs, cancelled, may_end = [], threading.Event(), threading.Event()

    def work(progress) -> None:
        runs.append(1)
        if len(runs) > 1:
            return
        try:
            while True:
                progress(PullProgress("first"))
                time.sleep(0.01)
        finally:
            cancelled.set()
            assert may_end.wait(HANG_S)

    operations.begin("left", "a", work)
    wait_until(lambda: operations.follow("left", 0).count)
    clock.now_s += 16.0
    assert cancelled.wait(HANG_S)
    operations.begin("next", "a", work)
    wait_until(lambda: operations.follow("next", 0).done)
    may_end.set()
    assert len(runs) == 2


def test_the_number_of_running_operations_is_limited(operations):
    may_end = threading.Event()
    for key in ("a", "b"):
        operations.begin(key, key, lambda progress: may_end.wait(HANG_S))
    with pytest.raises(OverloadedError, match="already running"):
        operations.begin("c", "c", lambda progress: None)
    may_end.set()
