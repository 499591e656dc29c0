"""The processes that store responses, without Ray."""

from typing import Any

from serve_app.responses.response_store import ResponseStore, StoreLimits
from serve_app.responses.stored_responses import StoredResponses

LIMITS = StoreLimits(max_bytes=2**20, tenant_bytes=2**19, max_age_s=60.0)


class FakeProcesses:
    """Each process is a store; None has been lost. `spare`: the store of the process that is
    started when none runs."""

    def __init__(self, *stores: ResponseStore | None, spare: ResponseStore | None = None) -> None:
        self.stores = list(stores)
        self.spare = spare

    async def broadcast(self, method: str, *arguments: Any, timeout_s: float | None) -> list[Any]:
        return [getattr(store, method)(*arguments) for store in self.stores if store is not None]

    async def await_one(self) -> None:
        if not any(self.stores):
            if self.spare is None:
                raise TimeoutError
            self.stores = [self.spare]


def one_process() -> StoredResponses:
    return StoredResponses(FakeProcesses(ResponseStore(LIMITS)))
