"""Loads models on request and unloads idle ones, several in one process, within limits.

A pool belongs to one event loop: code between two awaits is atomic.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from runtime.engine.engine_statistics import EngineStatistics
from runtime.engine.fairness import may_enter
from runtime.errors import (
    CaravanError,
    DoesNotFitError,
    EngineDeadError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
)
from serve_app.config.keep_alive import FOREVER
from serve_app.fair_gate import FairGate
from serve_app.logs import get_logger
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import ChatDelta, Task
from serve_app.on_demand.pool_load import PoolLoad
from serve_app.on_demand.pooled_model import (
    PooledModel,
    PooledReplica,
    StoredVersion,
    held_bytes,
    total_bytes,
)
from serve_app.on_demand.report import Resident

# A model gets at most this share of the memory unless it needs more, which leaves room for others.
MEMORY_SHARES = 2
# An engine that takes longer to end its current step is stuck, as for its own check.
UNLOAD_S = 300.0
# The tenant of work that belongs to no request, such as unloading.
NO_TENANT = ""

T = TypeVar("T")

log = get_logger()


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of a model: with a cache for one request, and for all requests that it may run.

    Both include `base_bytes` of weights that it shares with loaded models of the same `base`.
    """

    minimum_bytes: int
    full_bytes: int
    base: str | None = None
    base_bytes: int = 0


class Loader(Protocol):
    """Finds, plans, loads and unloads models. The pool calls it in its own threads."""

    def find(self, name: str) -> StoredVersion:
        """ModelNotFoundError if there is none of that name."""

    def outline(
        self, version: StoredVersion, verbose: bool = False
    ) -> tuple[ModelCard, MemoryNeed]:
        """The card and memory need, from the model's headers. Safe for several threads."""

    def load(self, version: StoredVersion, memory_bytes: int) -> PooledReplica: ...
    def unload(self, replica: Any) -> None:
        """Ends a replica that `load` returned. Its memory is in use until `reclaim`."""

    def reclaim(self) -> None:
        """Frees the memory of ended replicas that are no longer referenced."""

    def free_bytes(self, shared_bytes: int = 0) -> int:
        """Device memory for a further model, of whose weights the loaded models already have
        `shared_bytes`."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`max_waiting`: maximum number of requests that wait for a model to be loaded; one tenant may
    fill only part of the remaining places (`may_enter`). `max_models` None: limited by memory
    only."""

    max_loaded_bytes: int
    max_models: int | None = None
    keep_alive_s: float = 300.0
    max_waiting: int = 512


class ModelPool:
    """Loads each model once for all its requests, and unloads the least recently used idle one
    when another needs its memory.

    A model is in use while a request for it waits or runs. It stays loaded for `keep_alive_s`
    after the last request; a request may set another duration, which applies to later ones too.
    """

    def __init__(
        self, loader: Loader, limits: PoolLimits, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._loader = loader
        self._limits = limits
        self._clock = clock
        self._load_metrics = PoolLoad()
        self._entries: dict[str, PooledModel] = {}
        # Models that are still loaded, but replaced by another version or being unloaded.
        self._outgoing: set[PooledModel] = set()
        self._changing = FairGate(1)  # held while memory is assigned or freed
        self._finding = ThreadPoolExecutor(1, "finding")
        self._outlining = ThreadPoolExecutor(1, "outlining")
        # Separate from that of outlines, so that a slow description does not delay a load.
        self._describing = ThreadPoolExecutor(1, "describing")
        self._loading = ThreadPoolExecutor(1, "loading")

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        """The replica's deltas, once the model is loaded; waiting for that counts as queueing."""
        begun_ns = time.monotonic_ns()
        async with (
            # The replica has no name here: an unloaded one must not stay referenced.
            self._used(task.model, task.keep_alive_s, task.tenant) as entry,
            aclosing(entry.loaded_replica.generate(task)) as deltas,
        ):
            waited_ns = time.monotonic_ns() - begun_ns
            async for delta in deltas:
                yield _delayed(delta, waited_ns)

    async def load(self, name: str, keep_alive_s: float | None, tenant: str = NO_TENANT) -> None:
        async with self._used(name, keep_alive_s, tenant):
            pass

    async def unload(self, name: str) -> bool:
        """Unloads all versions of the model after their running requests; False if none was
        loaded."""
        named = [each for each in self._all() if each.version.name.lower() == name.lower()]
        for entry in named:
            entry.keep_alive_s = 0.0
            await self._unload_if_idle(entry)
            if entry.expiring is not None:
                await asyncio.wait({entry.expiring})
        return bool(named)

    async def retire_outdated(self) -> None:
        """Unload the versions that the store no longer has, after their running requests; returns
        before they are unloaded."""
        for entry in [*self._entries.values()]:
            try:
                outdated = await self._find(entry.version.name) != entry.version
            except ModelNotFoundError:
                outdated = True
            except CaravanError:  # the store cannot be read
                continue
            if outdated and self._entries.get(entry.version.name) is entry:
                self._detach(entry)
                if entry.idle:
                    self._unload_soon(entry, "no longer stored")

    async def describe(self, name: str, verbose: bool = False) -> ModelCard:
        """The model's card; does not load the model."""
        version = await self._find(name)
        entry = self._entries.get(version.name)
        if entry is not None and entry.replica is not None and entry.version == version:
            if not verbose:
                return entry.replica.describe()
            return await _run(self._describing, partial(entry.replica.describe, verbose=True))
        card, _ = await _run(self._describing, self._loader.outline, version, verbose)
        return card

    async def version(self, name: str) -> tuple[str, int]:
        """The digest of the model's version, and the tokens of the context with which it is loaded
        or would be."""
        version = await self._find(name)
        card, _ = await _run(self._outlining, self._loader.outline, version)
        return version.digest, card.context_tokens

    def residents(self) -> tuple[Resident, ...]:
        """The models that are loaded or being loaded."""
        now = self._clock()
        residents = (entry.resident(now) for entry in self._all())
        return tuple(resident for resident in residents if resident is not None)

    def statistics(self) -> dict[str, EngineStatistics]:
        """Statistics of the loaded models, by name."""
        entries = self._entries.items()
        return {name: each.replica.statistics() for name, each in entries if each.replica}

    @property
    def free_bytes(self) -> int:
        """Bytes that may be loaded without unloading anything."""
        return max(0, self._limits.max_loaded_bytes - total_bytes(self._all()))

    @property
    def limits(self) -> PoolLimits:
        return self._limits

    def measures(self) -> dict[str, float]:
        """Load metrics for autoscaling, without those of the store."""
        entries = self._all()
        return self._load_metrics.metrics(
            [entry.replica.statistics() for entry in entries if entry.replica],
            held_requests=sum(entry.users for entry in entries if entry.replica is None),
            used_share=self._share([entry for entry in entries if entry.users]),
        )

    def check(self) -> None:
        """EngineDeadError if an engine has failed, or does not end when its model is unloaded; the
        process must then be replaced."""
        for entry in self._all():
            if entry.replica is not None:
                entry.replica.check()
            if entry.ending_since is not None and time.monotonic() > entry.ending_since + UNLOAD_S:
                raise EngineDeadError(
                    f"Unloading model '{entry.version.name}' takes more than {UNLOAD_S:g} seconds."
                )

    async def close(self) -> None:
        """Unloads every model, also those in use."""
        entries = self._all()
        for entry in entries:
            entry.cancel_timer()
            assert entry.loading is not None
            entry.loading.cancel()
        await asyncio.gather(*(e.loading for e in entries if e.loading), return_exceptions=True)
        async with self._changing.place(NO_TENANT):
            for entry in entries:
                if entry.replica is not None:
                    await self._unload(entry, "the process ends")
        for executor in (self._finding, self._outlining, self._describing, self._loading):
            executor.shutdown(wait=False)

    @asynccontextmanager
    async def _used(
        self, name: str, keep_alive_s: float | None, tenant: str
    ) -> AsyncIterator[PooledModel]:
        """The loaded model, which stays loaded until the end of the context."""
        entry = await self._entry(name, tenant)
        entry.users_of[tenant] += 1
        entry.cancel_timer()
        if keep_alive_s is not None:
            entry.keep_alive_s = keep_alive_s
        try:
            assert entry.loading is not None
            # Shielded: other requests may wait for the same load.
            await asyncio.shield(entry.loading)
            yield entry
        finally:
            entry.leave(tenant)
            entry.used_at = time.monotonic()
            if not entry.users:
                await self._unload_if_idle(entry)

    async def _entry(self, name: str, tenant: str) -> PooledModel:
        version = await self._find(name)
        entry = self._entries.get(version.name)
        if entry is not None and entry.version != version:
            await self._retire(entry)
            entry = self._entries.get(version.name)
        if entry is None:
            entry = PooledModel(version, self._limits.keep_alive_s, tenant)
            self._entries[version.name] = entry
            entry.loading = asyncio.create_task(self._load(entry))
        if entry.replica is None:
            self._check_waiting(entry, tenant)
        return entry

    def _check_waiting(self, entry: PooledModel, tenant: str) -> None:
        """OverloadedError if too many requests wait, besides the one that began the load."""
        own, limit = entry.users_of[tenant], 1 + self._limits.max_waiting
        loading = f"model '{entry.version.name}' to be loaded"
        if entry.users >= limit:
            raise OverloadedError(
                f"{entry.users:,} requests wait for {loading}; the limit is {limit - 1:,}"
            )
        if not may_enter(own, entry.users, limit, reserved=1):
            raise OverloadedError(f"{own:,} requests of this client wait for {loading}")

    async def _find(self, name: str) -> StoredVersion:
        return await _run(self._finding, self._loader.find, name)

    async def _retire(self, entry: PooledModel) -> None:
        """Unload a version that the store has replaced, after its running requests."""
        self._detach(entry)
        await self._unload_if_idle(entry)

    def _detach(self, entry: PooledModel) -> None:
        """Later requests do not use the entry; its bytes count until it is unloaded."""
        self._entries.pop(entry.version.name, None)
        self._outgoing.add(entry)
        entry.keep_alive_s = 0.0

    async def _load(self, entry: PooledModel) -> None:
        begun = time.monotonic()
        try:
            entry.replica = await self._load_within_limits(entry)
        except BaseException as error:
            self._forget(entry)
            # Other exceptions may have an empty text.
            reason = str(error) if isinstance(error, CaravanError) else repr(error)
            log.info("not loaded", model=entry.version.name, reason=reason)
            if isinstance(error, DoesNotFitError):
                raise ModelUnavailableError(str(error)) from error
            raise
        entry.card = entry.replica.describe()
        entry.bytes = entry.card.reserved_bytes
        seconds = round(time.monotonic() - begun, 3)
        log.info("loaded", model=entry.version.name, bytes=entry.bytes, seconds=seconds)
        if not entry.users:
            await self._unload_if_idle(entry)

    async def _load_within_limits(self, entry: PooledModel) -> PooledReplica:
        card, need = await _run(self._outlining, self._loader.outline, entry.version)
        async with self._changing.place(entry.tenant):
            entry.bytes = await self._assign_memory(entry, need)
            entry.base, entry.base_bytes, entry.card = need.base, need.base_bytes, card
        return await _run(self._loading, self._loader.load, entry.version, entry.bytes)

    async def _assign_memory(self, entry: PooledModel, need: MemoryNeed) -> int:
        """Bytes that the model may take; unloads idle models to free them.

        DoesNotFitError if the model never fits, OverloadedError, without unloading any, if models
        in use have the memory or the places.
        """
        limit = self._limits.max_loaded_bytes
        if need.minimum_bytes > limit:
            raise DoesNotFitError(
                f"Model '{entry.version.name}' needs {need.minimum_bytes:,} bytes; models on "
                f"demand may take {limit:,} (`on_demand.max_loaded_bytes`). Raise that, or lower "
                "`on_demand.model.context_tokens` or `max_sequences`."
            )
        share = limit // (self._limits.max_models or MEMORY_SHARES)
        wanted = max(need.minimum_bytes, min(need.full_bytes, share))
        while True:
            others = [each for each in self._all() if each is not entry and each.holds_memory]
            shared = held_bytes(need.base, need.base_bytes, others)
            free = min(
                limit - total_bytes(others) + shared,
                await self._device_bytes(need.minimum_bytes, shared),
            )
            if self._has_place(others) and free >= need.minimum_bytes:
                return min(wanted, free)
            in_use = [each for each in others if not each.idle]
            freed = total_bytes(others) - total_bytes(in_use)
            freed += held_bytes(need.base, need.base_bytes, in_use) - shared
            if not self._has_place(in_use) or free + freed < need.minimum_bytes:
                refused = self._share_of(1, need.minimum_bytes)
                self._load_metrics.note_refused(entry.version.name, refused)
                raise self._refusal(entry, need, free, in_use)
            idle = [each for each in others if each.idle]
            await self._unload(min(idle, key=lambda each: each.used_at), "memory needed")

    def _has_place(self, others: Sequence[PooledModel]) -> bool:
        """Whether one more model than these may be loaded."""
        return self._limits.max_models is None or len(others) < self._limits.max_models

    async def _device_bytes(self, needed: int, shared: int) -> int:
        """Free bytes of the device. If fewer than needed, memory is reclaimed first: the exception
        of a failed request may have referenced the engine while that was unloaded."""
        free = await _run(self._loading, self._loader.free_bytes, shared)
        if free >= needed:
            return free
        await _run(self._loading, self._loader.reclaim)
        return await _run(self._loading, self._loader.free_bytes, shared)

    def _share(self, entries: Sequence[PooledModel]) -> float:
        """The share of the process that the models take, by bytes or by their number."""
        return self._share_of(len(entries), total_bytes(entries))

    def _share_of(self, count: int, nbytes: int) -> float:
        limits = self._limits
        by_number = count / limits.max_models if limits.max_models else 0.0
        return max(by_number, nbytes / max(1, limits.max_loaded_bytes))

    def _refusal(
        self, entry: PooledModel, need: MemoryNeed, free: int, in_use: Sequence[PooledModel]
    ) -> OverloadedError:
        """The error has no names of other models, which the client may not know; the log has."""
        model, names = entry.version.name, sorted(each.version.name for each in in_use)
        log.info("no memory", model=model, in_use=names)
        reason = f"loaded models in use: {len(names)}"
        if not self._has_place(in_use):
            return OverloadedError(
                f"model '{model}' would be one too many: `on_demand.max_models` is "
                f"{self._limits.max_models}; {reason}"
            )
        return OverloadedError(
            f"model '{model}' needs {need.minimum_bytes:,} bytes and {max(0, free):,} are free for "
            f"models on demand; {reason if names else 'other processes use the memory'}"
        )

    async def _unload_if_idle(self, entry: PooledModel) -> None:
        """Unloads the model after `keep_alive_s`, at once if that is 0."""
        entry.cancel_timer()
        if not entry.idle or entry not in self._all():
            return
        if entry.keep_alive_s == 0:
            # Shielded: no timer would unload the model if the request is cancelled now.
            await asyncio.shield(self._unload_if_still_idle(entry, "requested"))
            return
        entry.expires_at = self._clock() + entry.keep_alive_s
        if entry.keep_alive_s != FOREVER:
            loop = asyncio.get_running_loop()
            expired = partial(self._unload_soon, entry, "keep_alive expired")
            entry.timer = loop.call_later(entry.keep_alive_s, expired)

    def _unload_soon(self, entry: PooledModel, reason: str) -> None:
        entry.expiring = asyncio.create_task(self._unload_if_still_idle(entry, reason))

    async def _unload_if_still_idle(self, entry: PooledModel, reason: str) -> None:
        used_at = entry.used_at
        async with self._changing.place(NO_TENANT):
            # A request that has ended meanwhile has decided anew how long the model stays.
            if entry.idle and entry.used_at == used_at and entry in self._all():
                await self._unload(entry, reason)

    async def _unload(self, entry: PooledModel, reason: str) -> None:
        """The caller holds `_changing`, so the memory is not assigned before it is free."""
        entry.cancel_timer()
        self._load_metrics.note_unloaded(entry.loaded_replica.statistics())
        self._forget(entry)
        self._outgoing.add(entry)  # its bytes count until it is unloaded
        await asyncio.shield(self._end(entry))
        log.info("unloaded", model=entry.version.name, reason=reason)

    async def _end(self, entry: PooledModel) -> None:
        replica, entry.replica = entry.replica, None
        try:
            await _run(self._loading, self._end_replica, entry, replica)
            del replica
            await _run(self._loading, self._loader.reclaim)
        finally:
            self._outgoing.discard(entry)

    def _end_replica(self, entry: PooledModel, replica: PooledReplica | None) -> None:
        entry.ending_since = time.monotonic()
        self._loader.unload(replica)

    def _forget(self, entry: PooledModel) -> None:
        if self._entries.get(entry.version.name) is entry:
            del self._entries[entry.version.name]
        self._outgoing.discard(entry)

    def _all(self) -> list[PooledModel]:
        return [*self._entries.values(), *self._outgoing]


def _delayed(delta: ChatDelta, waited_ns: int) -> ChatDelta:
    """The delta with `waited_ns` added to the time in the queue."""
    if delta.usage is None:
        return delta
    usage = replace(delta.usage, queue_ns=delta.usage.queue_ns + waited_ns)
    return replace(delta, usage=usage)


async def _run(executor: Executor, work: Callable[..., T], *arguments: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
