"""All replicas of a deployment, asked together through its handle."""

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class Handle(Protocol):
    """The part of a Serve handle that is of use here."""

    def broadcast(self, method_name: str, *arguments: Any) -> Any: ...

    def choose_replica(self, *, _reserve: bool) -> AbstractAsyncContextManager[Any]: ...


class Replicas:
    """Those behind a handle; none where Serve has stopped them all."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def ask(self, method: str, *arguments: Any, timeout_s: float | None) -> list[Any]:
        """What those that are there answer; who fails to is left out.

        TimeoutError when one of them has not answered in time.
        """
        asked = self._handle.broadcast(method, *arguments)
        try:
            told = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
        except TimeoutError:
            raise
        except Exception:  # Serve's way of saying that nobody is there
            return []
        return [answer for answer in told if not isinstance(answer, BaseException)]

    async def await_one(self) -> None:
        """Until there is one. With a reservation: only then does Serve see that somebody waits."""
        async with self._handle.choose_replica(_reserve=True):
            return
