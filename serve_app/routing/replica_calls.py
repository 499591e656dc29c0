"""Control calls to the replicas of a deployment, of which some may hang."""

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from runtime.errors import CaravanError, ReplicaLostError
from serve_app.logs import get_logger

T = TypeVar("T")

# Limit of the calls that wait for a replica that hangs; it misses further ones.
MAX_LATE_CALLS = 256

log = get_logger()


def outside_request(
    call: Callable[..., Awaitable[T]], *arguments: Any, **named: Any
) -> asyncio.Task[T]:
    """Starts a call through a handle, in a context without the HTTP request.

    All calls that Serve sees within an HTTP request get the id of that request, and of those that
    are not routed yet its router keeps one per id: the other ones would wait forever.
    """

    async def answer() -> T:
        return await call(*arguments, **named)

    return asyncio.create_task(answer(), context=contextvars.Context())


class NamedReplicaCalls(Protocol):
    """Calls single replicas of a deployment; see serve_app.routing.named_replicas."""

    @property
    def names(self) -> Sequence[str]: ...

    async def call(self, replica: str, method: str, *arguments: Any) -> Any: ...

    async def await_one(self) -> None: ...


class Replicas:
    """The replicas of a deployment; there are none while Serve has stopped them all.

    A replica that does not answer a call in time hangs until it answers that call or is lost:
    callers wait for the others only. So it delays a caller once. Calls are not cancelled, as the
    replica executes them when it continues; until it has, it gets no other.
    """

    def __init__(self, calls: NamedReplicaCalls) -> None:
        self._calls = calls
        self._running: set[asyncio.Task[Any]] = set()  # keeps them from being collected
        self._late: dict[str, set[asyncio.Task[Any]]] = {}  # by the replica, which hangs

    async def ask_all(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        until_answered: bool = False,
        deliver: bool = False,
    ) -> list[Any]:
        """The answers of all replicas that answer within `timeout_s`, without those that raise an
        exception; an empty list if there are no replicas.

        `until_answered`: if none has answered by then, waits for the first answer, also from
        replicas that hang; otherwise raises TimeoutError. `deliver`: replicas that hang get the
        call as well, as soon as they have answered the calls before it.
        """
        names = self._names()
        prompt = [name for name in names if name not in self._late]
        called = names if deliver else prompt
        calls = {name: self._start(name, method, arguments) for name in called}
        await self._await_in_time({name: calls[name] for name in prompt}, timeout_s)
        answers = _answers(calls.values())
        if not answers and until_answered:
            late = [self._start(name, method, arguments) for name in names if name not in calls]
            try:
                return await _first_answers([*calls.values(), *late])
            except asyncio.CancelledError:
                for call in late:  # which wait for earlier ones
                    call.cancel()
                raise
        if not answers and not self._late.keys().isdisjoint(self._calls.names):
            raise TimeoutError(f"no replica has answered {method} within {timeout_s:g} s")
        return answers

    async def ask_any(self, method: str, *arguments: Any, patience_s: float) -> Any:
        """The answer of one replica. Another one is called too if it raises an exception or does
        not answer within `patience_s`; those that hang are called only if all do.

        If all raise errors, raises the first that is not ReplicaLostError, or else that. Raises
        ReplicaLostError if there are no replicas.
        """
        while not (names := self._names()) and (late := list(chain(*self._late.values()))):
            await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        names = [name for name in names if name not in self._late] or names
        calls: list[asyncio.Task[Any]] = []
        for name in random.sample(names, len(names)):
            calls.append(self._start(name, method, arguments))
            await self._await_in_time({name: calls[-1]}, patience_s)
            if answers := _answers(calls):
                return answers[0]
        if answers := await _first_answers(calls):
            return answers[0]
        errors = [each.result() for each in calls] or [ReplicaLostError("there is no replica")]
        raise min(errors, key=lambda error: isinstance(error, ReplicaLostError))

    async def await_one(self) -> None:
        """Waits until there is a replica. Serve starts one if there is none."""
        await self._calls.await_one()

    async def await_late(self, timeout_s: float) -> bool:
        """Waits until the replicas that hang have executed their calls or are lost. False after
        `timeout_s`."""
        late = [*chain(*self._late.values())]
        return not late or not (await asyncio.wait(late, timeout=timeout_s))[1]

    def _names(self) -> list[str]:
        """The replicas that can be called now or later."""
        names = self._calls.names
        return [name for name in names if len(self._late.get(name, ())) < MAX_LATE_CALLS]

    def _start(self, name: str, method: str, arguments: Sequence[Any]) -> asyncio.Task[Any]:
        """A call whose result is the answer or a CaravanError; of a replica that hangs, it waits
        for the earlier ones."""
        earlier = frozenset(self._late.get(name, ()))
        call = outside_request(self._outcome, name, method, arguments, earlier)
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        if earlier:
            self._note_late(name, call)
        return call

    async def _outcome(
        self,
        name: str,
        method: str,
        arguments: Sequence[Any],
        earlier: frozenset[asyncio.Task[Any]],
    ) -> Any:
        if earlier:
            await asyncio.wait(earlier)
            if name not in self._calls.names:
                return ReplicaLostError(f"replica {name} ended before it was called")
        try:
            return await self._calls.call(name, method, *arguments)
        except CaravanError as error:
            log.debug("call failed", replica=name, method=method, reason=repr(error))
            return error

    async def _await_in_time(
        self, calls: Mapping[str, asyncio.Task[Any]], timeout_s: float
    ) -> None:
        if not calls:
            return
        _, late = await asyncio.wait(calls.values(), timeout=timeout_s)
        for name, call in calls.items():
            if call in late:
                if name not in self._late:
                    log.warning("replica does not answer", replica=name, seconds=timeout_s)
                self._note_late(name, call)

    def _note_late(self, name: str, call: asyncio.Task[Any]) -> None:
        late = self._late.setdefault(name, set())
        if call not in late:
            late.add(call)
            call.add_done_callback(partial(self._forget_late, name))
            if len(late) == MAX_LATE_CALLS:
                log.warning("replica misses further calls", replica=name, waiting=len(late))

    def _forget_late(self, name: str, call: asyncio.Task[Any]) -> None:
        self._late[name].discard(call)
        if not self._late[name]:
            del self._late[name]


def _answers(calls: Iterable[asyncio.Task[Any]]) -> list[Any]:
    results = [each.result() for each in calls if each.done()]
    return [result for result in results if not isinstance(result, CaravanError)]


async def _first_answers(calls: Iterable[asyncio.Task[Any]]) -> list[Any]:
    """The answers so far, as soon as there is one; none if all calls have failed."""
    calls = [*calls]
    while not (answers := _answers(calls)) and (waiting := [c for c in calls if not c.done()]):
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    return answers
