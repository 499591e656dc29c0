"""The same replica behind plain uvicorn, without Ray: `python -m bench.plain SETTINGS PORT`."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence

import uvicorn

from serve_app.api.bodies import BodyLimits
from serve_app.api.ingress import ingress_app
from serve_app.api.request_images import ImageRules
from serve_app.config.settings import AppSettings, ModelSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.catalogue import Catalogue, ServedModel
from serve_app.gateway.listing import ListedModel, LoadedModel
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import ChatDelta, Task
from serve_app.replica.loading import load_replica
from serve_app.replica.replica import ModelReplica
from serve_app.transport.wire import Address


class OneReplica:
    """Directory and lists of a backend that has its only replica at hand."""

    def __init__(self, replica: ModelReplica) -> None:
        self._replica = replica

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address:
        raise AssertionError("tasks go to the replica at hand")

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        return self._replica.describe(verbose=verbose)

    async def load(self, model: str, keep_alive_s: float | None) -> None:
        """It is there already."""

    async def unload(self, model: str) -> None:
        """It stays."""

    async def configured(self) -> Sequence[ListedModel]:
        return ()

    async def stored(self) -> Sequence[ListedModel]:
        return ()

    async def find_stored(self, name: str) -> ListedModel | None:
        return None

    async def loaded(self) -> Sequence[LoadedModel]:
        return ()


class LocalBackend(ChatBackend):
    """Tasks go to a replica in this process."""

    def __init__(self, settings: ModelSettings, replica: ModelReplica) -> None:
        served = ServedModel(settings.name, settings.options, settings.brings_options)
        here = OneReplica(replica)
        super().__init__(Catalogue([served], here), here, start_timeout_s=60.0)
        self._replica = replica

    def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        return self._replica.generate(task)


async def main(settings: AppSettings, port: int) -> None:
    [model] = settings.models
    replica = load_replica(model)
    app = ingress_app(
        LocalBackend(model, replica),
        api_keys=None,
        body_limits=BodyLimits.of(settings),
        image_rules=ImageRules.of(settings),
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    try:
        await server.serve()
    finally:
        replica.close()


if __name__ == "__main__":
    asyncio.run(main(AppSettings.model_validate_json(sys.argv[1]), int(sys.argv[2])))
