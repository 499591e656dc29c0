"""`python -m bench.plain SETTINGS PORT`: serves one replica with plain uvicorn, without Ray."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn

from serve_app.api.ingress import IngressOptions, ingress_app
from serve_app.config.settings import AppSettings, ModelSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ModelRegistry, configured_model
from serve_app.messages.listing import LoadedModel
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import ChatDelta, Task
from serve_app.replica.file_headers import listed_model
from serve_app.replica.loading import load_replica
from serve_app.replica.replica import ModelReplica
from serve_app.transport.wire import Address


class OneReplica:
    """The replicas of a model: a single one, in this process."""

    def __init__(self, replica: ModelReplica) -> None:
        self._replica = replica

    async def choose(
        self, task: Task, *, avoid: frozenset[str] = frozenset(), identity: str | None = None
    ) -> Address:
        raise AssertionError("tasks do not leave this process")

    async def choose_earlier(
        self, task: Task, *, avoid: frozenset[str] = frozenset()
    ) -> Address | None:
        return None

    async def describe(self, *, verbose: bool) -> ModelCard:
        return self._replica.describe(verbose=verbose)

    async def ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return [LoadedModel.of(self._replica.describe())]


class LocalBackend(ChatBackend):
    """Runs tasks on a replica in this process."""

    def __init__(self, settings: ModelSettings, replica: ModelReplica) -> None:
        served = configured_model(settings, listed_model(settings, os.environ))
        registry = ModelRegistry([served], {settings.name: OneReplica(replica)})
        super().__init__(registry, start_timeout_s=60.0)
        self._replica = replica

    def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        return self._replica.generate(task)


async def main(settings: AppSettings, port: int) -> None:
    [model] = settings.models
    replica = load_replica(model)
    app = ingress_app(
        LocalBackend(model, replica),
        IngressOptions.of(settings, api_keys=None, proxy_secret=None),
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    try:
        await server.serve()
    finally:
        replica.close()


if __name__ == "__main__":
    asyncio.run(main(AppSettings.model_validate_json(sys.argv[1]), int(sys.argv[2])))
