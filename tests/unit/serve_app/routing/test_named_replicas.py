"""Calls of single replicas over a fake handle: answers, lost replicas, and those that hang."""

import asyncio
from collections.abc import Awaitable
from copy import copy
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

from runtime.errors import ModelUnavailableError, ReplicaLostError
from serve_app.routing.named_replicas import FINISH_S, NamedReplicas
from tests.patience import pass_time, settled
from tests.unit.serve_app.routing.test_replica_set import FakeHandle, RunningFake


class CalledHandle(FakeHandle):
    """Replies with what was called where, or as `answers` state for a replica."""

    def __init__(self, *names: str) -> None:
        super().__init__(*map(RunningFake, names))
        self.router.initialize_state(deployment=self.deployment_name)
        self.answers: dict[str, Any] = {}
        self.called: dict[str, str] = {}

    def options(self, **chosen: str) -> "CalledHandle":
        named = copy(self)
        named.called = chosen
        return named

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return self._answer(self.called, arguments)

    async def _answer(self, called: dict[str, str], arguments: tuple[Any, ...]) -> Any:
        answer = self.answers.get(called["session_id"])
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        return called, arguments


async def test_each_replica_is_called_by_its_name():
    replicas = NamedReplicas(CalledHandle("a", "b"))
    assert replicas.names == ["a", "b"]
    for name in replicas.names:
        called = {"method_name": "report", "session_id": name}
        assert await replicas.call(name, "report", 5) == (called, (5,))


async def test_there_are_no_names_before_serve_lists_replicas():
    handle = FakeHandle(RunningFake("a"))
    handle.options = lambda: handle
    assert NamedReplicas(handle).names == []


@pytest.mark.parametrize("error", [ActorDiedError(), OSError("the disk is broken")])
async def test_a_replica_that_raises_is_lost(error):
    handle = CalledHandle("a", "b")
    handle.answers["a"] = error
    replicas = NamedReplicas(handle)
    with pytest.raises(ReplicaLostError, match="replica a did not answer report"):
        await replicas.call("a", "report")
    assert await replicas.call("b", "report")


async def test_a_deployment_that_serve_has_given_up_is_not_waited_for():
    handle = CalledHandle()

    def choose_replica() -> None:
        raise DeploymentUnavailableError(None)

    handle.choose_replica = choose_replica
    with pytest.raises(ModelUnavailableError, match="failed to start"):
        await NamedReplicas(handle).await_one()


async def test_an_error_of_ours_is_raised_without_the_traceback_of_ray():
    class Wrapped(ModelUnavailableError):
        """As Ray wraps errors, whose messages then have the traceback of the other process."""

        cause = ModelUnavailableError("it does not fit")

    handle = CalledHandle("a")
    handle.answers["a"] = Wrapped("Traceback: it does not fit")
    with pytest.raises(ModelUnavailableError, match=r"^it does not fit$"):
        await NamedReplicas(handle).call("a", "describe")


async def test_a_replica_that_serve_does_not_list_any_more_may_finish_within_a_time():
    handle = CalledHandle("a", "b")
    handle.answers = {"a": asyncio.Event(), "b": asyncio.Event()}
    replicas = NamedReplicas(handle)
    finished, lost = (asyncio.create_task(replicas.call(name, "report")) for name in "ab")
    await settled()
    handle.replace()
    await pass_time(FINISH_S / 2)
    assert not finished.done() and not lost.done()
    handle.answers["a"].set()
    assert (await finished)[0]["session_id"] == "a"
    while not lost.done():
        await pass_time(FINISH_S / 2)
    with pytest.raises(ReplicaLostError, match="replica b ended before it answered report"):
        await lost


async def test_a_replica_that_hangs_is_waited_for():
    handle = CalledHandle("a")
    handle.answers["a"] = may_answer = asyncio.Event()
    calling = asyncio.create_task(NamedReplicas(handle).call("a", "report"))
    for _ in range(9):
        await pass_time(FINISH_S)
    assert not calling.done()
    may_answer.set()
    await calling
