"""The processes that store responses, without Ray."""

import asyncio
from typing import Any

from runtime.errors import ReplicaLostError
from serve_app.responses.response_store import ResponseStore, StoreLimits
from serve_app.responses.stored_responses import StoredResponses
from serve_app.routing.replica_calls import Replicas

LIMITS = StoreLimits(max_bytes=2**20, tenant_bytes=2**19, max_age_s=60.0)


class FakeProcesses:
    """Each process is a store, named by its number from `first` on; None has been lost. `spare`:
    the store of the process that is started when none runs. Those in `hanging` answer when its
    event is set."""

    def __init__(self, *stores: ResponseStore | None, spare: ResponseStore | None = None) -> None:
        self.stores = list(stores)
        self.first = 0
        self.spare = spare
        self.hanging: dict[str, asyncio.Event] = {}

    @property
    def names(self) -> list[str]:
        return [str(number) for number, _ in enumerate(self.stores, self.first)]

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        if replica in self.hanging:
            await self.hanging[replica].wait()
        store = self.stores[int(replica) - self.first]
        if store is None:
            raise ReplicaLostError(f"process {replica} has ended")
        return getattr(store, method)(*arguments)

    async def await_one(self) -> None:
        if not any(self.stores):
            if self.spare is None:
                raise TimeoutError
            self.stores = [self.spare]


def stored_by(processes: FakeProcesses) -> StoredResponses:
    return StoredResponses(Replicas(processes))


def one_process() -> StoredResponses:
    return stored_by(FakeProcesses(ResponseStore(LIMITS)))
