"""Models that are loaded when they are asked for, several in one process, within limits.

One event loop uses a pool: what is not awaited here happens at once.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from runtime.engine.engine import EngineStatistics
from runtime.engine.fairness import may_enter
from runtime.errors import (
    CaravanError,
    DoesNotFitError,
    ModelUnavailableError,
    OverloadedError,
)
from serve_app.config.keep_alive import FOREVER
from serve_app.gateway.fair_gate import FairGate
from serve_app.gateway.listing import LoadedModel
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import ChatDelta, Task
from serve_app.logs import get_logger
from serve_app.on_demand.pool_load import PoolLoad
from serve_app.on_demand.report import Resident

# A model gets no more than such a part of the room if less will do, so that others have room too.
PARTS = 2
# The tenant of what is done for no request, such as unloading.
NOBODY = ""

T = TypeVar("T")

log = get_logger()


@dataclass(frozen=True, slots=True)
class Found:
    """A model as the store has it now: `digest` tells its states apart."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model takes in memory: with a cache for one request, and for all that it runs."""

    least: int
    full: int


class Replica(Protocol):
    """A loaded model; see serve_app.replica.replica.ModelReplica."""

    def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]: ...
    def describe(self, *, verbose: bool = False) -> ModelCard: ...
    def statistics(self) -> EngineStatistics: ...
    def check(self) -> None: ...


class Loader(Protocol):
    """Where the models come from. All of it takes time; it runs in threads of the pool's."""

    def find(self, name: str) -> Found:
        """ModelNotFoundError when there is none of that name."""

    def outline(self, found: Found, verbose: bool = False) -> tuple[ModelCard, Sizes]:
        """What the model is and would take, without loading it. Several threads may ask at once."""

    def load(self, found: Found, memory_bytes: int) -> Replica: ...
    def unload(self, replica: Any) -> None:
        """One that `load` gave."""

    def free_bytes(self) -> int:
        """What the device has, beside what is loaded already."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_waiting`: requests of one model that may wait for it to be loaded, one tenant's as many
    as there are places left."""

    max_loaded_bytes: int
    max_models: int | None = None
    keep_alive_s: float = 300.0
    max_waiting: int = 512


class ModelPool:
    """Loads each model once, however many ask for it, and unloads what has not been used longest.

    A model is in use from when a request asks for it to the request's end; it stays for the
    `keep_alive_s` of the last request that said any.
    """

    def __init__(
        self, loader: Loader, limits: Limits, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._loader = loader
        self._limits = limits
        self._clock = clock
        self._gauge = PoolLoad()
        self._entries: dict[str, _Entry] = {}
        self._outgoing: set[_Entry] = set()  # those whose name means something else by now
        self._changing = FairGate(1)  # of what is loaded
        self._finding = ThreadPoolExecutor(1, "finding")
        self._outlining = ThreadPoolExecutor(1, "outlining")
        self._describing = ThreadPoolExecutor(1, "describing")  # no load waits for it
        self._loading = ThreadPoolExecutor(1, "loading")

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        """As the model's replica does, once it is loaded; waiting for that counts as queueing."""
        asked_ns = time.monotonic_ns()
        async with (
            self._used(task.model, task.keep_alive_s, task.tenant) as replica,
            aclosing(replica.generate(task)) as deltas,
        ):
            waited_ns = time.monotonic_ns() - asked_ns
            async for delta in deltas:
                yield _delayed(delta, waited_ns)

    async def load(self, name: str, keep_alive_s: float | None, tenant: str = NOBODY) -> None:
        async with self._used(name, keep_alive_s, tenant):
            pass

    async def unload(self, name: str) -> bool:
        """Whether it was there. What it is answering is answered first."""
        named = (each for n, each in self._entries.items() if n.lower() == name.lower())
        entry = next(named, None)
        if entry is None:
            return False
        entry.keep_alive_s = 0.0
        await self._rest(entry)
        return True

    async def describe(self, name: str, *, verbose: bool = False) -> ModelCard:
        """What is known of a model, loaded or not; it is not loaded for that."""
        found = await self._found(name)
        entry = self._entries.get(found.name)
        if entry is not None and entry.replica is not None and entry.found == found:
            if not verbose:
                return entry.replica.describe()
            return await _run(self._describing, partial(entry.replica.describe, verbose=True))
        card, _ = await _run(self._describing, self._loader.outline, found, verbose)
        return card

    def residents(self) -> tuple[Resident, ...]:
        """Those that are there, or on their way."""
        now = self._clock()
        told = (entry.told(now) for entry in self._all())
        return tuple(resident for resident in told if resident is not None)

    @property
    def free_bytes(self) -> int:
        """What may still be loaded without unloading anything."""
        return max(0, self._limits.max_loaded_bytes - sum(each.bytes for each in self._all()))

    @property
    def limits(self) -> Limits:
        return self._limits

    def measures(self) -> dict[str, float]:
        """What autoscaling is told."""
        entries = self._all()
        return self._gauge.read(
            {entry: entry.replica.statistics() for entry in entries if entry.replica},
            held=sum(entry.users for entry in entries if entry.replica is None),
            used=self._share(*(entry.bytes for entry in entries if entry.users)),
        )

    def check(self) -> None:
        """EngineDeadError when an engine has failed: then the process has to be replaced."""
        for entry in self._all():
            if entry.replica is not None:
                entry.replica.check()

    async def close(self) -> None:
        """Unloads everything, whoever uses it."""
        entries = self._all()
        for entry in entries:
            entry.cancel_timer()
            assert entry.loading is not None
            entry.loading.cancel()
        await asyncio.gather(*(e.loading for e in entries if e.loading), return_exceptions=True)
        async with self._changing.place(NOBODY):
            for entry in entries:
                if entry.replica is not None:
                    await self._drop(entry, "the process ends")
        for executor in (self._finding, self._outlining, self._describing, self._loading):
            executor.shutdown(wait=False)

    @asynccontextmanager
    async def _used(
        self, name: str, keep_alive_s: float | None, tenant: str
    ) -> AsyncIterator[Replica]:
        entry = await self._entry(name, tenant)
        entry.users_of[tenant] += 1
        entry.cancel_timer()
        if keep_alive_s is not None:
            entry.keep_alive_s = keep_alive_s
        try:
            assert entry.loading is not None
            # Whoever leaves does not take the model from the others.
            yield await asyncio.shield(entry.loading)
        finally:
            entry.leave(tenant)
            entry.used_at = time.monotonic()
            if not entry.users:
                await asyncio.shield(self._rest(entry))

    async def _entry(self, name: str, tenant: str) -> "_Entry":
        found = await self._found(name)
        entry = self._entries.get(found.name)
        if entry is not None and entry.found != found:
            await self._replace(entry)
            entry = self._entries.get(found.name)
        if entry is None:
            entry = _Entry(found, self._limits.keep_alive_s, tenant)
            self._entries[found.name] = entry
            entry.loading = asyncio.create_task(self._load(entry))
        if entry.replica is None:
            self._check_waiting(entry, tenant)
        return entry

    def _check_waiting(self, entry: "_Entry", tenant: str) -> None:
        """The first request is the one that the model is loaded for."""
        own, most = entry.users_of[tenant], 1 + self._limits.max_waiting
        loading = f"model '{entry.found.name}' to be loaded"
        if entry.users >= most:
            raise OverloadedError(
                f"{entry.users:,} requests wait for {loading}; at most {most - 1:,} may"
            )
        if not may_enter(own, entry.users, most, reserved=1):
            raise OverloadedError(f"{own:,} requests of this client wait for {loading}")

    async def _found(self, name: str) -> Found:
        return await _run(self._finding, self._loader.find, name)

    async def _replace(self, entry: "_Entry") -> None:
        """Its name means another model now: it goes as soon as it has answered."""
        self._entries.pop(entry.found.name, None)
        self._outgoing.add(entry)
        entry.keep_alive_s = 0.0
        await self._rest(entry)

    async def _load(self, entry: "_Entry") -> Replica:
        begun = time.monotonic()
        try:
            replica = await self._loaded(entry)
        except BaseException as error:
            self._forget(entry)
            # An exception that is not of this project may have no text at all.
            reason = str(error) if isinstance(error, CaravanError) else repr(error)
            log.info("not loaded", model=entry.found.name, reason=reason)
            if isinstance(error, DoesNotFitError):
                raise ModelUnavailableError(str(error)) from error
            raise
        entry.replica, entry.card = replica, replica.describe()
        entry.bytes = entry.card.reserved_bytes
        seconds = round(time.monotonic() - begun, 3)
        log.info("loaded", model=entry.found.name, bytes=entry.bytes, seconds=seconds)
        if not entry.users:
            await self._rest(entry)
        return replica

    async def _loaded(self, entry: "_Entry") -> Replica:
        card, sizes = await _run(self._outlining, self._loader.outline, entry.found)
        async with self._changing.place(entry.tenant):
            entry.bytes = await self._room(entry, sizes)
            entry.card = card
        return await _run(self._loading, self._loader.load, entry.found, entry.bytes)

    async def _room(self, entry: "_Entry", sizes: Sizes) -> int:
        """How much the model may take, once others have been unloaded for it.

        DoesNotFitError: it never has room here. OverloadedError: everything is in use.
        """
        most = self._limits.max_loaded_bytes
        if sizes.least > most:
            raise DoesNotFitError(
                f"Model '{entry.found.name}' needs {sizes.least:,} bytes; models on demand may "
                f"take {most:,} (`on_demand.max_loaded_bytes`). Lower "
                "`on_demand.model.context_tokens` or `max_sequences`, or give them more."
            )
        wanted = max(sizes.least, min(sizes.full, most // (self._limits.max_models or PARTS)))
        while True:
            others = [each for each in self._all() if each is not entry]
            free = min(
                most - sum(each.bytes for each in others),
                await _run(self._loading, self._loader.free_bytes),
            )
            counted = self._limits.max_models is None or len(others) < self._limits.max_models
            if counted and free >= sizes.least:
                return min(wanted, free)
            idle = [each for each in others if each.idle]
            if not idle:
                self._gauge.note_refused(entry.found.name, self._share(sizes.least))
                raise self._full(entry, sizes, free)
            await self._drop(min(idle, key=lambda each: each.used_at), "to make room")

    def _share(self, *nbytes: int) -> float:
        """How much of the room such models take, by their bytes or by their number."""
        limits = self._limits
        by_number = len(nbytes) / limits.max_models if limits.max_models else 0.0
        return max(by_number, sum(nbytes) / max(1, limits.max_loaded_bytes))

    def _full(self, entry: "_Entry", sizes: Sizes, free: int) -> OverloadedError:
        busy = ", ".join(sorted(each.found.name for each in self._all() if each is not entry))
        return OverloadedError(
            f"model '{entry.found.name}' needs {sizes.least:,} bytes and {max(0, free):,} are free "
            f"for models on demand; all that is loaded is in use: {busy or 'by other processes'}"
        )

    async def _rest(self, entry: "_Entry") -> None:
        """Nobody uses it: it goes after `keep_alive_s`."""
        entry.cancel_timer()
        if not entry.idle or entry not in self._all():
            return
        if entry.keep_alive_s == 0:
            await self._leave(entry, "as asked")
            return
        entry.expires_at = self._clock() + entry.keep_alive_s
        if entry.keep_alive_s != FOREVER:
            loop = asyncio.get_running_loop()
            entry.timer = loop.call_later(entry.keep_alive_s, self._expire, entry)

    def _expire(self, entry: "_Entry") -> None:
        entry.expiring = asyncio.create_task(self._leave(entry, "not used any more"))

    async def _leave(self, entry: "_Entry", reason: str) -> None:
        async with self._changing.place(NOBODY):
            if entry.idle and entry in self._all():
                await self._drop(entry, reason)

    async def _drop(self, entry: "_Entry", reason: str) -> None:
        """Under the lock, so that nobody counts on memory that is not yet free."""
        replica = entry.replica
        assert replica is not None
        entry.cancel_timer()
        self._gauge.note_gone(replica.statistics())
        self._forget(entry)
        self._outgoing.add(entry)  # its bytes are taken until it is gone
        entry.replica = None
        try:
            await asyncio.shield(_run(self._loading, self._loader.unload, replica))
        finally:
            self._outgoing.discard(entry)
        log.info("unloaded", model=entry.found.name, reason=reason)

    def _forget(self, entry: "_Entry") -> None:
        if self._entries.get(entry.found.name) is entry:
            del self._entries[entry.found.name]
        self._outgoing.discard(entry)

    def _all(self) -> list["_Entry"]:
        return [*self._entries.values(), *self._outgoing]


class _Entry:
    """One state of one model, from when it is first asked for until it is gone.

    `tenant`: whose request made it load. `bytes`: what is reserved for it. `users_of`: requests of
    each tenant that have asked for it and have not ended.
    """

    def __init__(self, found: Found, keep_alive_s: float, tenant: str) -> None:
        self.found = found
        self.keep_alive_s = keep_alive_s
        self.tenant = tenant
        self.users_of: Counter[str] = Counter()
        self.used_at = time.monotonic()
        self.expires_at = 0.0
        self.bytes = 0
        self.card: ModelCard | None = None
        self.replica: Replica | None = None
        self.loading: asyncio.Task[Replica] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.expiring: asyncio.Task[None] | None = None

    @property
    def users(self) -> int:
        return self.users_of.total()

    @property
    def idle(self) -> bool:
        return self.replica is not None and not self.users

    def leave(self, tenant: str) -> None:
        self.users_of[tenant] -= 1
        if not self.users_of[tenant]:
            del self.users_of[tenant]

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def told(self, now: float) -> Resident | None:
        if self.card is None:
            return None
        expires_at = self.expires_at if self.idle else now + self.keep_alive_s
        loaded = replace(
            LoadedModel.of(self.card),
            reserved_bytes=self.bytes,
            expires_at=None if expires_at == FOREVER else expires_at,
        )
        if self.replica is None:
            return Resident(loaded, users=self.users)
        now_at = self.replica.statistics()
        return Resident(
            loaded,
            ready=True,
            users=self.users,
            running=now_at.running,
            waiting=now_at.waiting,
            slots=now_at.slots,
        )


def _delayed(delta: ChatDelta, waited_ns: int) -> ChatDelta:
    """The delta of a request that was `waited_ns` old when its replica got it."""
    if delta.usage is None:
        return delta
    usage = replace(delta.usage, queue_ns=delta.usage.queue_ns + waited_ns)
    return replace(delta, usage=usage)


async def _run(executor: Executor, work: Callable[..., T], *arguments: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
