"""Serve's shells: each holds one plain object and passes Serve's calls on to it."""

import asyncio
import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app import haproxy
from serve_app.api import http_server
from serve_app.api.bodies import BodyLimits
from serve_app.api.ingress import ingress_app
from serve_app.api.keys import ApiKey
from serve_app.api.refusals import explained
from serve_app.api.request_images import ImageRules
from serve_app.autoscaling.serve_policy import encoder_stats, engine_stats
from serve_app.config.settings import AppSettings, ModelSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.catalogue import Catalogue, ServedModel
from serve_app.gateway.cluster import RayCluster
from serve_app.gateway.directory import ModelDirectory
from serve_app.gateway.listing import LoadedModel
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.replica_calls import Replicas
from serve_app.gateway.schedulability import Plan, Schedulability
from serve_app.logs import get_logger
from serve_app.on_demand.commands import Answer, Command
from serve_app.on_demand.management import Management
from serve_app.on_demand.processes import PoolDirectory
from serve_app.on_demand.report import PoolReport
from serve_app.on_demand.settings import OnDemandSettings
from serve_app.replica.unserved import UnservedReplica
from serve_app.routing.load_reports import Reporter
from serve_app.routing.replica_set import HandleDirectory
from serve_app.transport.server import StreamServer

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from runtime.engine.engine import EngineStatistics
    from serve_app.replica.replica import ModelReplica
    from serve_app.vision.encoder import EncoderStatistics

DRAIN_S = 20.0

log = get_logger()


class ModelDeployment:
    """A replica of one model. Serve reaches it for control; tokens leave by the direct stream."""

    async def __init__(  # type: ignore[misc]
        self, settings: ModelSettings, encoders: DeploymentHandle | None = None
    ) -> None:
        log.info("starting", model=settings.name)
        self._encodes = encoders is None
        self._opened = AsyncExitStack()
        self._replica: ModelReplica | UnservedReplica
        try:
            self._replica = await self._loaded(settings, encoders)
        except Exception as error:
            reason = str(explained(f"Model {settings.name}", error))
            self._replica = UnservedReplica(settings.name, reason)
        self._opened.push_async_callback(asyncio.to_thread, self._replica.close)
        reporter = Reporter(self._replica.generate, self._replica.statistics)
        server = StreamServer(reporter.generate, report=reporter.report)
        self._opened.push_async_callback(server.close, drain_s=DRAIN_S)
        address = await server.start(ray.util.get_node_ip_address())
        self._address = dataclasses.replace(address, model=self._replica.identity)

    async def _loaded(
        self, settings: ModelSettings, encoders: DeploymentHandle | None
    ) -> "ModelReplica":
        # Here, not above: the ingress imports this module too and has no use for torch.
        from serve_app.replica.loading import load_replica
        from serve_app.replica.rank_actors import RankActors
        from serve_app.vision.encoder_choice import EncoderDirectory

        loop = asyncio.get_running_loop()
        directory = None if encoders is None else EncoderDirectory(encoders, loop)
        lead = None
        if settings.parallel.tensor > 1:
            ranks = RankActors(settings, ray.util.get_node_ip_address())
            self._opened.callback(ranks.close)
            lead = ranks.lead
        return await asyncio.to_thread(load_replica, settings, directory, lead)

    async def record_replica_metadata(self) -> dict[str, Any]:
        return dataclasses.asdict(self._address)

    async def describe(self, verbose: bool = False) -> ModelCard:
        return self._replica.describe(verbose=verbose)

    async def loaded(self) -> LoadedModel:
        """The part of the card that lists want."""
        return LoadedModel.of(self._replica.describe())

    async def statistics(self) -> "EngineStatistics":
        return self._replica.statistics()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return engine_stats(self._replica.statistics(), encodes=self._encodes)

    async def check_health(self) -> None:
        self._replica.check()

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica: the stream drains, then the engine ends."""
        await self._opened.aclose()


class VisionEncoder:
    """An encoder of the images of models that share a vision model; features leave by a stream."""

    async def __init__(self, settings: ModelSettings) -> None:  # type: ignore[misc]
        from serve_app.replica.loading import load_encoder
        from serve_app.transport.feature_server import FeatureServer

        self._opened = AsyncExitStack()
        with _logged(f"the vision encoder of model {settings.name}"):
            self._encoder = await asyncio.to_thread(load_encoder, settings)
        self._opened.push_async_callback(asyncio.to_thread, self._encoder.close)
        server = FeatureServer(self._encoder)
        self._opened.push_async_callback(server.close, drain_s=DRAIN_S)
        self._address = await server.start(ray.util.get_node_ip_address())

    async def record_replica_metadata(self) -> dict[str, Any]:
        return dataclasses.asdict(self._address)

    async def address(self) -> dict[str, Any]:
        """The same; who asks all replicas for it knows them all."""
        return dataclasses.asdict(self._address)

    async def statistics(self) -> "EncoderStatistics":
        return self._encoder.statistics()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        statistics = self._encoder.statistics()
        return encoder_stats(
            images_waiting=statistics.images_waiting,
            images_encoded_total=statistics.images_encoded_total,
            images_known_total=statistics.images_known_total,
        )

    async def check_health(self) -> None:
        self._encoder.check()

    async def __del__(self) -> None:
        await self._opened.aclose()


class OnDemandDeployment:
    """A process with models on demand. Serve reaches it for control, all at once or any of them."""

    async def __init__(self, settings: OnDemandSettings) -> None:  # type: ignore[misc]
        from serve_app.on_demand.start import open_store_manager

        self._opened = AsyncExitStack()
        host, replica = ray.util.get_node_ip_address(), serve.get_replica_context().replica_id
        with _logged("models on demand"):
            self._store_manager = await open_store_manager(
                settings, self._opened, host, replica.unique_id
            )

    async def report(self) -> PoolReport:
        return await self._store_manager.report()

    async def order(self, replicas: tuple[str, ...], command: Command) -> Answer | None:
        """None unless it is one of these."""
        if self._store_manager.address.replica not in replicas:
            return None
        return await self._store_manager.answer(command)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._store_manager.pool.measures()

    async def check_health(self) -> None:
        self._store_manager.pool.check()

    async def __del__(self) -> None:
        await self._opened.aclose()


@serve.ingress()
class Ingress:
    """All protocols, in front of all models.

    `on_demand`: the processes for those that are not configured. `plan`: what was known of both
    when the application was built. `keys`: None on a server without API keys.
    """

    def __init__(
        self,
        settings: AppSettings,
        models: Mapping[str, DeploymentHandle],
        on_demand: DeploymentHandle | None = None,
        plan: Plan | None = None,
        keys: tuple[ApiKey, ...] | None = None,
    ) -> None:
        self._settings = settings
        self._models = models
        self._on_demand = on_demand
        self._plan = plan or Plan()
        self._keys = keys
        self._watching: set[asyncio.Task[None]] = set()

    async def __serve_build_asgi_app__(self) -> "Starlette":
        settings = self._settings
        for risk in haproxy.risks(os.environ):
            log.warning("haproxy", text=risk)
        http_server.configure(os.environ)
        http_server.return_large_allocations()
        placement = Schedulability(self._plan.needs, RayCluster())
        self._watching.add(asyncio.create_task(placement.watch()))
        pool = None if self._on_demand is None else PoolDirectory(Replicas(self._on_demand))
        directory = ModelDirectory(
            HandleDirectory(self._models),
            {name: Replicas(handle) for name, handle in self._models.items()},
            known=self._plan.known,
            encoders=self._plan.encoders,
            pool=pool,
            placement=placement,
        )
        models = [
            ServedModel(model.name, model.options, model.brings_options)
            for model in settings.models
        ]
        defaults = None if settings.on_demand is None else settings.on_demand.model.options
        backend = ChatBackend(
            Catalogue(models, directory, defaults=defaults),
            directory,
            start_timeout_s=settings.start_timeout_s,
            failover=settings.failover.rules,
            private_caches=settings.caches_are_private(keyed=self._keys is not None),
        )
        management = None
        if pool is not None and settings.models_are_managed(keyed=self._keys is not None):
            management = Management(pool, settings.models)
        return ingress_app(
            backend,
            management,
            api_keys=self._keys,
            allowed_origins=settings.allowed_origins,
            allowed_hosts=settings.allowed_hosts,
            concurrent_requests=settings.concurrent_requests,
            processes=settings.ingress_replicas,
            body_limits=BodyLimits.of(settings),
            strict_fields=settings.strict_fields,
            image_rules=ImageRules.of(settings),
            proxy_secret=haproxy.enforced_secret(os.environ),
        )


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Logs in one line why `what` cannot start. What Serve shows has that line too."""
    try:
        yield
    except Exception as error:
        known = explained(what, error)
        log.error("not served", what=what, reason=str(known))
        raise known from None
