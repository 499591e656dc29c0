"""What Serve deploys as the HTTP server: joins the HTTP application and the cluster."""

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app import haproxy
from serve_app.api import http_server, large_bodies
from serve_app.api.ingress import IngressOptions, ingress_app
from serve_app.api.keys import ApiKey
from serve_app.api.observing import Telemetry
from serve_app.config.settings import AppSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.cluster import RayCluster
from serve_app.gateway.failover import FailoverRules
from serve_app.gateway.model_management import ModelManagement
from serve_app.gateway.model_registry import ModelRegistry, configured_model
from serve_app.gateway.readiness import Readiness
from serve_app.gateway.schedulability import BuildFacts, Schedulability
from serve_app.logs import get_logger, structure_records
from serve_app.on_demand.processes import PoolDirectory
from serve_app.responses.stored_responses import StoredResponses
from serve_app.routing.named_replicas import NamedReplicas
from serve_app.routing.prefix_memory import PrefixMemory
from serve_app.routing.replica_calls import Replicas
from serve_app.routing.replica_set import ReplicaSet
from serve_app.telemetry.exposition import ClusterExposition
from serve_app.telemetry.ray_meter import RayMeter
from serve_app.telemetry.spans import configured_spans

if TYPE_CHECKING:
    from starlette.applications import Starlette

# Limit for asking another ingress at the start.
OTHER_TIMEOUT_S = 5.0

log = get_logger()


@serve.ingress()
class Ingress:
    """The HTTP server of all protocols and models.

    `on_demand`: the processes that load models on demand. `facts`: about the models, from when the
    application was built. `keys`: None on a server without API keys. `responses`: the processes
    that store responses.
    """

    def __init__(
        self,
        settings: AppSettings,
        models: Mapping[str, DeploymentHandle],
        on_demand: DeploymentHandle | None = None,
        facts: BuildFacts | None = None,
        keys: tuple[ApiKey, ...] | None = None,
        responses: DeploymentHandle | None = None,
    ) -> None:
        self._settings = settings
        self._models = models
        self._on_demand = on_demand
        self._facts = facts or BuildFacts()
        self._keys = keys
        self._responses = responses
        self._readiness: Readiness | None = None
        self._watching: set[asyncio.Task[None]] = set()

    async def __serve_build_asgi_app__(self) -> "Starlette":
        settings = self._settings
        structure_records()
        for risk in haproxy.risks(os.environ):
            log.warning("haproxy", text=risk)
        http_server.configure(os.environ)
        http_server.return_large_allocations()
        large_bodies.configure_process()
        cluster, meter, spans = RayCluster(), RayMeter(), configured_spans(os.environ)
        schedulability = Schedulability(self._facts.needs, cluster)
        self._watching.add(asyncio.create_task(schedulability.watch()))
        pool = None if self._on_demand is None else PoolDirectory(NamedReplicas(self._on_demand))
        replicas = _replica_sets(self._models)
        self._readiness = await self._watch_readiness(replicas, cluster)
        registry = ModelRegistry(
            [configured_model(each, self._facts.known.get(each.name)) for each in settings.models],
            replicas,
            defaults=None if settings.on_demand is None else settings.on_demand.model.options,
            pool=pool,
            facts=self._facts,
            schedulability=schedulability,
        )
        failover = settings.failover
        backend = ChatBackend(
            registry,
            start_timeout_s=settings.start_timeout_s,
            failover=FailoverRules(failover.max_retries, failover.silence_s),
            private_caches=settings.caches_are_private(keyed=self._keys is not None),
            meter=meter,
            spans=spans,
        )
        management = None
        if pool is not None and settings.models_are_managed(keyed=self._keys is not None):
            management = ModelManagement(
                pool,
                settings.models,
                start_timeout_s=settings.start_timeout_s,
                schedulability=schedulability,
            )
        options = IngressOptions.of(settings, self._keys, haproxy.enforced_secret(os.environ))
        responses = self._responses
        stored = None
        if responses is not None:
            stored = StoredResponses(Replicas(NamedReplicas(responses)))
        exposition = ClusterExposition(cluster.metrics_urls)
        telemetry = Telemetry(meter=meter, exposition=exposition, ids_echoed=True, spans=spans)
        return ingress_app(backend, options, management, stored, telemetry, self._readiness)

    async def is_ready(self) -> bool:
        """The state that an ingress takes over that starts later."""
        return self._readiness is not None and self._readiness.reached

    async def _watch_readiness(
        self, replicas: Mapping[str, ReplicaSet], cluster: RayCluster
    ) -> Readiness:
        always = [
            replicas[model.name]
            for model in self._settings.models
            if model.autoscaling is None or model.autoscaling.min_replicas > 0
        ]
        others = len(always) < len(self._settings.models) or self._on_demand is not None
        patience_s = self._settings.start_timeout_s
        readiness = Readiness(always, patience_s=patience_s, others=others)
        if always and await _other_is_ready(cluster):
            readiness.reached = True
        self._watching.add(asyncio.create_task(readiness.watch()))
        return readiness


def _replica_sets(models: Mapping[str, DeploymentHandle]) -> dict[str, ReplicaSet]:
    """One for each model; one record of prefixes, whose size is limited, serves all."""
    prefixes = PrefixMemory()
    return {name: ReplicaSet(handle, prefixes) for name, handle in models.items()}


async def _other_is_ready(cluster: RayCluster) -> bool:
    """Whether an ingress that runs already, which this process may replace, is ready."""
    context = serve.get_replica_context()
    try:
        async with asyncio.timeout(OTHER_TIMEOUT_S):
            if not (await cluster.view()).running.get(context.deployment):
                return False
            other = serve.get_deployment_handle(context.deployment, context.app_name)
            return bool(await other.is_ready.remote())
    except Exception as error:
        log.warning("other ingress unknown", reason=repr(error))
        return False
