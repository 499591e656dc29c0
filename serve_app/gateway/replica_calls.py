"""Control calls to the replicas of a deployment through its handle."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from serve_app.logs import get_logger

T = TypeVar("T")

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


class Handle(Protocol):
    """The part of a Serve handle that is used here."""

    def broadcast(self, method_name: str, *arguments: Any) -> Any: ...

    def choose_replica(self) -> AbstractAsyncContextManager[Any]: ...


class ReplicaBroadcast(Protocol):
    """Calls all replicas of a deployment; see `Replicas`."""

    async def broadcast(
        self, method: str, *arguments: Any, timeout_s: float | None
    ) -> list[Any]: ...

    async def await_one(self) -> None: ...


class NamedReplicaCalls(Protocol):
    """Calls single replicas of a deployment; see serve_app.routing.named_replicas."""

    @property
    def names(self) -> Sequence[str]: ...

    async def call(self, replica: str, method: str, *arguments: Any) -> Any: ...

    async def await_one(self) -> None: ...


class Replicas:
    """The replicas behind a handle; there are none while Serve has stopped them all."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def broadcast(self, method: str, *arguments: Any, timeout_s: float | None) -> list[Any]:
        """The answers of all running replicas, without those that raise an exception.

        Raises TimeoutError if one of them does not answer in time.
        """
        calls = self._handle.broadcast(method, *arguments)
        try:
            answers = await calls.results_async(timeout_s=timeout_s, return_exceptions=True)
        except TimeoutError:
            raise
        except Exception as error:  # raised by Serve if there are no replicas
            log.debug("no replica called", method=method, reason=repr(error))
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def await_one(self) -> None:
        """Waits until there is a replica. Serve starts one if there is none."""
        await outside_request(reserve_one, self._handle)


async def reserve_one(handle: Handle) -> None:
    """Reserves a replica, for which Serve starts one if there is none, and releases it."""
    async with handle.choose_replica():
        return
