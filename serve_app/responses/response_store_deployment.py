"""What Serve deploys to store responses; forwards Serve's calls to one `ResponseStore`."""

from collections.abc import Sequence
from contextlib import suppress

from ray import serve

from serve_app.config.sections import ResponseStoreSettings
from serve_app.gateway.cluster import RayCluster
from serve_app.responses.response_store import (
    ReplicatedEntry,
    ResponseStore,
    Selection,
    StoredResponse,
    StoreLimits,
)
from serve_app.responses.stored_responses import await_successors, copy_from, hand_over
from serve_app.routing.named_replicas import NamedReplicas
from serve_app.routing.replica_calls import Replicas


class ResponseStoreDeployment:
    """A process that stores responses. `name`: of this deployment."""

    async def __init__(self, settings: ResponseStoreSettings, name: str) -> None:  # type: ignore[misc]
        limits = StoreLimits(settings.max_bytes, settings.tenant_bytes, settings.max_age_s)
        self._store = ResponseStore(limits)
        self._deployment = name
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._named = NamedReplicas(serve.get_deployment_handle(name, context.app_name))
        self._processes = Replicas(self._named)
        if await self._are_others_running():
            await copy_from(self._processes, self._store)
        self._known = {self._name, *self._named.names}

    async def put(self, tenant: str, stored: StoredResponse) -> bool:
        return self._store.put(tenant, stored)

    async def delete(self, tenant: str, id: str) -> bool:
        return self._store.delete(tenant, id)

    async def select(self, tenant: str, ids: Sequence[str], max_bytes: int) -> Selection:
        return self._store.select(tenant, ids, max_bytes)

    async def conversation(self, tenant: str, id: str, max_bytes: int) -> Selection:
        return self._store.conversation(tenant, id, max_bytes)

    async def ids(self) -> list[str]:
        return self._store.ids()

    async def copies(self, ids: list[str], max_bytes: int) -> list[ReplicatedEntry]:
        return self._store.copies(ids, max_bytes)

    async def merge(self, deleted: list[tuple[str, str]], copies: list[ReplicatedEntry]) -> None:
        self._store.merge(deleted, copies)

    async def check_health(self) -> None:
        """Removes expired responses too, and hands over changes to processes that Serve has listed
        since the last call: Serve calls this regularly, even without requests."""
        self._store.expire()
        listed = set(self._named.names)
        new, self._known = listed - self._known, {self._name, *listed}
        if new:
            await hand_over(self._processes, self._store)

    async def __del__(self) -> None:
        """Hands over the changes that the processes of a new version have not got. Serve awaits
        this when it stops the process, and lists those instead."""
        with suppress(Exception):  # the application or Serve ends
            if await self._are_others_running():
                await await_successors(self._named, self._name)
                await hand_over(self._processes, self._store)

    async def _are_others_running(self) -> bool:
        return bool((await RayCluster().view()).running.get(self._deployment))
