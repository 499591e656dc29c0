"""A model of a pool: how long it stays loaded, its memory, and the requests that use it."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.config.keep_alive import FOREVER
from serve_app.messages.listing import LoadedModel
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import ChatDelta, Task
from serve_app.on_demand.report import Resident


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A model of the store; `digest` (of its manifest) identifies its version."""

    name: str
    digest: str


class PooledReplica(Protocol):
    """A loaded model; see serve_app.replica.replica.ModelReplica."""

    def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]: ...
    def describe(self, *, verbose: bool = False) -> ModelCard: ...
    def statistics(self) -> EngineStatistics: ...
    def check(self) -> None: ...


class PooledModel:
    """One version of a model, from its first request until it is unloaded.

    `tenant`: the tenant whose request began the load. `bytes`: memory reserved for it, of which
    `base_bytes` are shared with other models of `base`. `users_of`: number of running and waiting
    requests by tenant. `ending_since`: since when its engine has been ending.
    """

    def __init__(self, version: StoredVersion, keep_alive_s: float, tenant: str) -> None:
        self.version = version
        self.keep_alive_s = keep_alive_s
        self.tenant = tenant
        self.users_of: Counter[str] = Counter()
        self.used_at = time.monotonic()
        self.expires_at = 0.0
        self.ending_since: float | None = None
        self.bytes = 0
        self.base: str | None = None
        self.base_bytes = 0
        self.card: ModelCard | None = None
        self.replica: PooledReplica | None = None
        self.loading: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.expiring: asyncio.Task[None] | None = None

    @property
    def loaded_replica(self) -> PooledReplica:
        assert self.replica is not None
        return self.replica

    @property
    def users(self) -> int:
        return self.users_of.total()

    @property
    def idle(self) -> bool:
        return self.replica is not None and not self.users

    @property
    def holds_memory(self) -> bool:
        """False until memory is assigned to it."""
        return self.card is not None

    def leave(self, tenant: str) -> None:
        self.users_of[tenant] -= 1
        if not self.users_of[tenant]:
            del self.users_of[tenant]

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def resident(self, now: float) -> Resident | None:
        """None until the model's size is planned."""
        if self.card is None:
            return None
        expires_at = self.expires_at if self.idle else now + self.keep_alive_s
        loaded = replace(
            LoadedModel.of(self.card),
            reserved_bytes=self.bytes,
            expires_at=None if expires_at == FOREVER else expires_at,
        )
        waiting = 0 if self.replica is None else self.replica.statistics().waiting
        return Resident(loaded, self.users, waiting)


def held_bytes(base: str | None, base_bytes: int, entries: Iterable[PooledModel]) -> int:
    """Those of the `base_bytes` of a base that the models hold already: all or none."""
    return base_bytes if base is not None and base in {each.base for each in entries} else 0


def total_bytes(entries: Iterable[PooledModel]) -> int:
    """Bytes of the models; shared weights count once."""
    total, bases = 0, set()
    for entry in entries:
        total += entry.bytes
        if entry.base is not None:
            total -= entry.base_bytes if entry.base in bases else 0
            bases.add(entry.base)
    return total
