"""Serve's shells: each holds one plain object and passes Serve's calls on to it."""

import asyncio
import dataclasses
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.autoscaling import autoscaling_stats
from serve_app.backend import ChatBackend, ServedModel
from serve_app.card import ModelCard
from serve_app.images import ImageRules
from serve_app.ingress import ingress_app
from serve_app.routing import HandleDirectory
from serve_app.settings import AppSettings, ModelSettings
from serve_app.stream.server import StreamServer

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from runtime.engine import EngineStatistics

DRAIN_S = 20.0


class ModelDeployment:
    """A replica of one model. Serve reaches it for control; tokens leave by the direct stream."""

    async def __init__(self, settings: ModelSettings) -> None:  # type: ignore[misc]
        # Here, not above: the ingress imports this module too and has no use for torch.
        from serve_app.loading import load_replica

        self._opened = AsyncExitStack()
        self._replica = await asyncio.to_thread(load_replica, settings)
        self._opened.push_async_callback(asyncio.to_thread, self._replica.close)
        server = StreamServer(self._replica.generate)
        self._opened.push_async_callback(server.close, drain_s=DRAIN_S)
        self._address = await server.start(ray.util.get_node_ip_address())

    async def record_replica_metadata(self) -> dict[str, Any]:
        return dataclasses.asdict(self._address)

    async def describe(self, verbose: bool = False) -> ModelCard:
        return self._replica.describe(verbose=verbose)

    async def statistics(self) -> "EngineStatistics":
        return self._replica.statistics()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return autoscaling_stats(self._replica.statistics())

    async def check_health(self) -> None:
        self._replica.check()

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica: the stream drains, then the engine ends."""
        await self._opened.aclose()


@serve.ingress()
class Ingress:
    """All protocols, in front of all models."""

    def __init__(self, settings: AppSettings, models: Mapping[str, DeploymentHandle]) -> None:
        self._settings = settings
        self._directory = HandleDirectory(models)

    async def __serve_build_asgi_app__(self) -> "Starlette":
        settings = self._settings
        backend = ChatBackend(
            [
                ServedModel(model.name, model.options, model.brings_options)
                for model in settings.models
            ],
            self._directory,
            start_timeout_s=settings.start_timeout_s,
        )
        return ingress_app(
            backend,
            api_keys=settings.api_keys,
            max_body_bytes=settings.max_body_bytes,
            image_rules=ImageRules.of(settings),
        )
