"""What Serve deploys to compute; each class forwards Serve's calls to one plain object."""

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from runtime.errors import CaravanError
from runtime.garbage_collection import collector_paused, lasting_imports
from serve_app.autoscaling.serve_policy import encoder_metrics, engine_metrics
from serve_app.config.on_demand_settings import OnDemandSettings
from serve_app.config.settings import ModelSettings
from serve_app.deployments.unavailable import (
    Unavailable,
    UnavailableEncoder,
    UnavailableReplica,
    UnavailableStoreManager,
    any_serves,
)
from serve_app.gateway.cluster import RayCluster
from serve_app.logs import get_logger, structure_records
from serve_app.messages.listing import LoadedModel
from serve_app.messages.model_card import ModelCard
from serve_app.messages.replica_status import ReplicaStatus
from serve_app.on_demand.report import CallResult, PoolReport
from serve_app.replica.load_errors import explained
from serve_app.routing.load_reports import LoadReporter
from serve_app.routing.named_replicas import NamedReplicas
from serve_app.routing.replica_calls import Replicas
from serve_app.telemetry import metrics
from serve_app.telemetry.metrics import ENCODER, ENGINE, Metric
from serve_app.telemetry.ray_meter import RayMeter
from serve_app.telemetry.request_spans import spanned_replies
from serve_app.telemetry.spans import configured_spans
from serve_app.telemetry.statistics_publisher import StatisticsPublisher, publish_regularly
from serve_app.transport.generation import generation_server
from serve_app.transport.stream_server import DRAIN_S

if TYPE_CHECKING:
    from serve_app.on_demand.store_manager import StoreManager
    from serve_app.replica.replica import ModelReplica
    from serve_app.vision.encoder_replica import EncoderReplica

S = TypeVar("S", bound=Unavailable)

log = get_logger()


class ModelDeployment:
    """A replica of one model. Control calls come through Serve's handles; tokens are sent over
    TCP."""

    async def __init__(  # type: ignore[misc]
        self, settings: ModelSettings, encoders: DeploymentHandle | None = None
    ) -> None:
        structure_records()
        spans = configured_spans(os.environ)
        log.info("starting", model=settings.name)
        self._settings = settings
        self._opened = AsyncExitStack()
        self._replica: ModelReplica | UnavailableReplica
        try:
            with collector_paused():
                self._replica = await self._loaded(settings, encoders)
        except Exception as error:
            self._replica = await _stand_in(
                UnavailableReplica,
                f"model '{settings.name}'",
                explained(f"Model {settings.name}", error),
                self._opened,
                model=settings.name,
            )
        self._opened.push_async_callback(asyncio.to_thread, self._replica.close)
        generate = spanned_replies(spans, self._replica.generate)
        reporter = LoadReporter(generate, self._replica.statistics)
        server = generation_server(reporter.generate, report=reporter.report)
        self._opened.push_async_callback(server.close, drain_s=DRAIN_S)
        address = await server.start(ray.util.get_node_ip_address())
        self._address = dataclasses.replace(address, model=self._replica.identity)
        statistics = self._replica.statistics
        _publish(self._opened, ENGINE, lambda: {settings.name: statistics()})

    async def _loaded(
        self, settings: ModelSettings, encoders: DeploymentHandle | None
    ) -> "ModelReplica":
        # Imported late, because an application is built with this module, but without torch.
        with lasting_imports():
            from serve_app.replica.loading import load_replica
            from serve_app.replica.rank_actors import RankActors
            from serve_app.vision.encoder_ranking import DeploymentEncoders

        directory = None
        if encoders is not None:
            replicas = Replicas(NamedReplicas(encoders))
            directory = DeploymentEncoders(replicas, asyncio.get_running_loop())
        rank_zero = None
        if settings.parallel.tensor > 1:
            ranks = RankActors(settings, ray.util.get_node_ip_address())
            self._opened.callback(ranks.close)
            rank_zero = ranks.rank_zero
        return await asyncio.to_thread(load_replica, settings, directory, rank_zero)

    async def record_replica_metadata(self) -> dict[str, Any]:
        return dataclasses.asdict(self._address)

    async def describe(self, verbose: bool = False) -> ModelCard:
        return self._replica.describe(verbose=verbose)

    async def loaded(self) -> LoadedModel:
        """The part of the card that model lists contain."""
        return LoadedModel.of(self._replica.describe())

    async def status(self) -> ReplicaStatus:
        replica = serve.get_replica_context().replica_id.unique_id
        return ReplicaStatus.of(replica, {self._settings.name: self._replica.statistics()})

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return engine_metrics(self._replica.statistics())

    async def check_health(self) -> None:
        self._replica.check()

    async def __del__(self) -> None:
        """Drains the streams, then closes the engine. Serve awaits this when it stops the
        replica."""
        await self._opened.aclose()


async def _stand_in(
    kind: type[S],
    what: str,
    error: CaravanError,
    opened: AsyncExitStack,
    *,
    model: str | None = None,
) -> S:
    """Takes the place of `what`, which could not be loaded. Raises the error if other replicas
    serve the same. Closes `opened`. `model`: its name in the log, if it is one."""
    logged = {"what": what} if model is None else {"model": model}
    await opened.aclose()
    if await _is_served_elsewhere(kind.probe):
        log.error("not started", **logged, reason=str(error))
        raise error from None
    log.error("not served", **logged, reason=str(error))
    return kind(what, str(error))


async def _is_served_elsewhere(probe: str) -> bool:
    """Whether other replicas of this replica's deployment serve the same; see `any_serves`."""
    context = serve.get_replica_context()
    if not (await RayCluster().view()).running.get(context.deployment):
        return False
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    return await any_serves(Replicas(NamedReplicas(handle)), probe)


class VisionEncoder:
    """An encoder for the models that share a vision model. Features are sent over a TCP stream.

    `settings`: of one of them; `contexts`: `context_tokens` of the others.
    """

    async def __init__(  # type: ignore[misc]
        self, settings: ModelSettings, contexts: Sequence[int | None] = ()
    ) -> None:
        with lasting_imports():
            from serve_app.replica.loading import load_encoder
            from serve_app.vision.feature_transfer import feature_server

        structure_records()
        self._opened = AsyncExitStack()
        self._encoder: EncoderReplica | UnavailableEncoder
        try:
            self._encoder = await asyncio.to_thread(load_encoder, settings, contexts)
        except Exception as error:
            what = f"the vision encoder of model '{settings.name}'"
            self._encoder = await _stand_in(
                UnavailableEncoder, what, explained(what, error), self._opened
            )
            return
        self._opened.push_async_callback(asyncio.to_thread, self._encoder.close)
        meter = RayMeter()

        def observe(seconds: float) -> None:
            meter.observe(metrics.ENCODER_SECONDS, seconds, settings.name)

        spans = configured_spans(os.environ)
        server = feature_server(self._encoder, observe=observe, spans=spans)
        self._opened.push_async_callback(server.close, drain_s=DRAIN_S)
        self._address = await server.start(ray.util.get_node_ip_address())
        statistics = self._encoder.statistics
        _publish(self._opened, ENCODER, lambda: {settings.name: statistics()})

    async def address(self) -> dict[str, Any]:
        """ModelUnavailableError with the reason if the encoder could not be loaded."""
        if isinstance(self._encoder, UnavailableEncoder):
            self._encoder.refuse()
        return dataclasses.asdict(self._address)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        statistics = self._encoder.statistics()
        return encoder_metrics(
            images_waiting=statistics.images_waiting,
            images_encoded_total=statistics.images_encoded_total,
            images_known_total=statistics.images_known_total,
        )

    async def check_health(self) -> None:
        self._encoder.check()

    async def __del__(self) -> None:
        await self._opened.aclose()


class OnDemandDeployment:
    """A process that loads models on demand. Serve's handles carry control calls."""

    async def __init__(self, settings: OnDemandSettings) -> None:  # type: ignore[misc]
        with lasting_imports():
            from serve_app.on_demand.store_manager_assembly import open_store_manager

        structure_records()
        self._opened = AsyncExitStack()
        host, replica = ray.util.get_node_ip_address(), serve.get_replica_context().replica_id
        self._store_manager: StoreManager | UnavailableStoreManager
        try:
            self._store_manager = await open_store_manager(
                settings, self._opened, host, replica.unique_id
            )
        except Exception as error:
            what = "models on demand"
            self._store_manager = await _stand_in(
                UnavailableStoreManager, what, explained(what, error), self._opened
            )
        _publish(self._opened, ENGINE, self._store_manager.statistics)

    async def report(self) -> PoolReport:
        return await self._store_manager.report()

    async def call(self, method: str, *arguments: Any) -> CallResult:
        """See `StoreManager.call`."""
        return await self._store_manager.call(method, *arguments)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._store_manager.measures()

    async def check_health(self) -> None:
        self._store_manager.check()

    async def __del__(self) -> None:
        await self._opened.aclose()


def _publish(
    opened: AsyncExitStack,
    fields: Mapping[str, Metric],
    statistics: Callable[[], Mapping[str, Any]],
) -> None:
    """Publishes the statistics of this replica until `opened` is closed."""
    replica = serve.get_replica_context().replica_id.unique_id
    publisher = StatisticsPublisher(RayMeter(), fields, replica)
    publishing = asyncio.create_task(publish_regularly(publisher, statistics))
    opened.callback(publishing.cancel)
