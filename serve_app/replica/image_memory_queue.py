"""Requests that wait for image memory, by turns over tenants."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from model_zoo.multimodal.image_cache import ImageCache, ImageLease
from runtime.engine.fairness import FairQueue, may_enter
from runtime.errors import OverloadedError

MAX_WAITING = 64
WAITING_PART = 4  # the files of waiting requests may take this part of the budget, beside it


def waiting_bytes(budget_bytes: int) -> int:
    """Maximum bytes of the files of waiting requests; the last one may exceed it."""
    return budget_bytes // WAITING_PART


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    nbytes: int
    take: Callable[[], ImageLease]
    lease: asyncio.Future[ImageLease]


class ImageMemoryQueue:
    """Leases of an image cache for requests, which wait while others use the memory.

    A waiting request holds no memory, so none waits for another one that waits. The first in turn
    is not overtaken, unless its tenant may take no more (see `ImageCache`). For one event loop.
    """

    def __init__(self, image_cache: ImageCache) -> None:
        self._cache = image_cache
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._files: Counter[str] = Counter()  # bytes of waiting requests, by tenant

    async def lease(
        self, file_bytes: int, *, ahead: int, salt: bytes, tenant: str, limited: bool
    ) -> ImageLease:
        """As `ImageCache.lease`. OverloadedError: too many requests wait, and this one is
        `limited`."""
        loop, nbytes = asyncio.get_running_loop(), file_bytes + ahead
        take = partial(self._cache.lease, file_bytes, ahead=ahead, salt=salt, tenant=tenant)
        if nbytes > self._cache.budget_bytes:
            return take()  # raises
        self._cache.freed = partial(_call, loop, self._serve)
        waiting = _Waiting(nbytes, take, loop.create_future())
        self._waiting.add(tenant, waiting)
        self._serve()
        if not waiting.lease.done() and limited and not self._may_wait(tenant):
            self._waiting.remove(tenant, waiting)
            raise self._overloaded()
        size = self._size(file_bytes)
        self._files[tenant] += size
        try:
            return await waiting.lease
        except asyncio.CancelledError:
            if waiting.lease.cancelled():
                self._waiting.remove(tenant, waiting)
            else:
                waiting.lease.result().close()
            raise
        finally:
            self._files[tenant] -= size
            self._files += Counter()  # without tenants that have none

    def _serve(self) -> None:
        for tenant, waiting in self._waiting.in_turn(self._cache.taken):
            if waiting.lease.done():
                continue  # it is cancelled, and its caller has not run since
            if self._cache.used_bytes + waiting.nbytes > self._cache.budget_bytes:
                return
            with contextlib.suppress(OverloadedError):
                lease = waiting.take()
                self._waiting.serve(tenant, waiting)
                waiting.lease.set_result(lease)

    def _may_wait(self, tenant: str) -> bool:
        most = waiting_bytes(self._cache.budget_bytes)
        return may_enter(self._files[tenant], self._files.total(), most)

    def _size(self, file_bytes: int) -> int:
        """So many bytes that no more than `MAX_WAITING` requests fit."""
        return max(file_bytes, waiting_bytes(self._cache.budget_bytes) // MAX_WAITING)

    def _overloaded(self) -> OverloadedError:
        used, most = self._cache.used_bytes, self._cache.budget_bytes
        return OverloadedError(
            f"images of other requests take {used:,} of the {most:,} bytes of "
            f"`image_memory_bytes`, and {len(self._waiting):,} requests wait for them already"
        )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Calls it on the event loop, from any thread. A closed loop has no waiting requests."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
