"""What Serve deploys to store responses; forwards Serve's calls to one `ResponseStore`."""

from collections.abc import Sequence

from ray import serve

from serve_app.config.sections import ResponseStoreSettings
from serve_app.gateway.cluster import RayCluster
from serve_app.gateway.replica_calls import Replicas
from serve_app.responses.response_store import (
    Copy,
    ResponseStore,
    Selection,
    StoredResponse,
    StoreLimits,
)
from serve_app.responses.stored_responses import copy_from
from serve_app.routing.named_replicas import NamedReplicas


class ResponseStoreDeployment:
    """A process that stores responses. `name`: of this deployment."""

    async def __init__(self, settings: ResponseStoreSettings, name: str) -> None:  # type: ignore[misc]
        limits = StoreLimits(settings.max_bytes, settings.tenant_bytes, settings.max_age_s)
        self._store = ResponseStore(limits)
        if (await RayCluster().view()).running.get(name):
            application = serve.get_replica_context().app_name
            handle = serve.get_deployment_handle(name, application)
            await copy_from(Replicas(NamedReplicas(handle)), self._store)

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

    async def copies(self, ids: list[str], max_bytes: int) -> list[Copy]:
        return self._store.copies(ids, max_bytes)

    async def check_health(self) -> None:
        """Removes expired responses too: Serve calls this regularly, even without requests."""
        self._store.expire()
