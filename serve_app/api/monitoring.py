"""Endpoints for monitoring: `/metrics`, and `/status.json` for the page `/status`."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app.api.access import allowed_models
from serve_app.gateway.model_registry import ModelRegistry
from serve_app.messages.replica_status import ReplicaStatus
from serve_app.telemetry.exposition import CONTENT_TYPE

Exposition = Callable[[], Awaitable[str]]

KEPT_S = 1.0
# Fields of EngineStatistics.
SHOWN = (
    "waiting",
    "running",
    "slots",
    "queued_tokens",
    "pages_total",
    "pages_owned",
    "images_waiting",
    "computed_tokens_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "completion_tokens_total",
    "preemptions_total",
)


class Monitoring:
    """Answers /metrics and /status.json. `exposition`: returns the text of the metrics."""

    def __init__(self, exposition: Exposition, registry: ModelRegistry) -> None:
        self._exposition = exposition
        self._registry = registry
        self._reading = asyncio.Lock()
        self._statuses: list[ReplicaStatus] = []
        self._read_at = 0.0
        self._kept_until = float("-inf")  # of a clock that is never set

    async def metrics(self, request: Request) -> Response:
        return Response(await self._exposition(), media_type=CONTENT_TYPE)

    async def status(self, request: Request) -> Response:
        """The engines of the models that the request's key may use. `at`: Unix time in seconds,
        which means the same on all hosts with an ingress."""
        allowed = allowed_models(request)
        configured = [name for name in self._registry.configured if name in allowed]
        async with self._reading:  # concurrent readers share one call of the replicas
            if time.monotonic() > self._kept_until:
                self._statuses = await self._registry.statuses()
                self._read_at = time.time()
                self._kept_until = time.monotonic() + KEPT_S
        models: dict[str, list[dict[str, Any]]] = {name: [] for name in configured}
        for model, engine in _engines(self._statuses):
            if model in allowed:
                models.setdefault(model, []).append(engine)
        shown = [{"name": name, "replicas": models[name]} for name in sorted(models)]
        return JSONResponse({"at": self._read_at, "models": shown})


def _engines(statuses: Iterable[ReplicaStatus]) -> Iterable[tuple[str, dict[str, Any]]]:
    for status in sorted(statuses, key=lambda each: each.replica):
        for model, statistics in status.engines.items():
            yield model, {"id": status.replica, **{name: statistics[name] for name in SHOWN}}
