"""Who serves what: configured models by deployments of their own, all others on demand."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from runtime.errors import CaravanError, RequestError
from serve_app.card import ModelCard
from serve_app.listing import ListedModel, LoadedModel
from serve_app.on_demand.directory import Everyone, PoolDirectory
from serve_app.placement import Placement
from serve_app.stream.wire import Address
from serve_app.task import Task

# The name of the deployment for models on demand, as `Placement` knows it.
ON_DEMAND = "on_demand"
LISTING_TIMEOUT_S = 3.0


class Configured(Protocol):
    """See serve_app.routing.HandleDirectory."""

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address: ...
    async def describe(self, model: str, *, verbose: bool) -> ModelCard: ...


class ModelDirectory:
    """See backend.Directory and catalogue.Lists.

    `replicas`: of each configured model. `known`: what their files say, where that could be seen
    when the application was built. `pool`: None where there is nothing on demand.
    """

    def __init__(
        self,
        configured: Configured,
        replicas: Mapping[str, Everyone],
        *,
        known: Mapping[str, ListedModel] | None = None,
        pool: PoolDirectory | None = None,
        placement: Placement | None = None,
    ) -> None:
        self._configured = configured
        self._replicas = replicas
        self._known = known or {}
        self._pool = pool
        self._placement = placement

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address:
        async with self._hopeful(task.model):
            if self._is_configured(task.model):
                return await self._configured.choose(task, avoid=avoid)
            return await self._on_demand.choose(task, avoid=avoid)

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        async with self._hopeful(model):
            if not self._is_configured(model):
                return await self._on_demand.describe(model, verbose=verbose)
            try:
                return await self._configured.describe(model, verbose=verbose)
            except CaravanError as error:
                raise _plain(error) from None

    async def load(self, model: str, keep_alive_s: float | None) -> None:
        if self._is_configured(model):
            await self.describe(model, verbose=False)
            return
        async with self._hopeful(model):
            await self._on_demand.load(model, keep_alive_s)

    async def unload(self, model: str) -> None:
        if self._is_configured(model):
            raise RequestError(
                f"model '{model}' cannot be unloaded: it is pinned by the configuration"
            )
        await self._on_demand.unload(model)

    async def configured(self) -> list[ListedModel]:
        """Those that run as they say it, the others as their files do, if these are known."""
        running = await self._running()
        listed = []
        for name in self._replicas:
            model = running[name][0].model if running[name] else self._known.get(name)
            listed += [] if model is None else [model]
        return listed

    async def stored(self) -> Sequence[ListedModel]:
        if self._pool is None:
            return []
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                return await self._pool.listed()
        except TimeoutError:
            return self._pool.last_listed

    async def find_stored(self, name: str) -> ListedModel | None:
        if self._pool is None:
            return None
        async with self._hopeful(name):
            return await self._pool.find(name)

    async def loaded(self) -> list[LoadedModel]:
        own = [loaded for found in (await self._running()).values() for loaded in found]
        return own if self._pool is None else [*own, *await self._pool.loaded()]

    async def _running(self) -> dict[str, list[LoadedModel]]:
        """What all replicas of all configured models have loaded."""
        found = await asyncio.gather(*map(_loaded, self._replicas.values()))
        return dict(zip(self._replicas, found, strict=True))

    def _is_configured(self, model: str) -> bool:
        return model in self._replicas

    @property
    def _on_demand(self) -> PoolDirectory:
        assert self._pool is not None, "the catalogue knows no model that nobody could load"
        return self._pool

    def _hopeful(self, model: str) -> AbstractAsyncContextManager[None]:
        if self._placement is None:
            return nullcontext()
        return self._placement.hopeful(model if self._is_configured(model) else ON_DEMAND)


async def _loaded(replicas: Everyone) -> list[LoadedModel]:
    try:
        told = await replicas.ask("loaded", timeout_s=LISTING_TIMEOUT_S)
    except TimeoutError:
        return []
    return [loaded for loaded in told if isinstance(loaded, LoadedModel)]


def _plain(error: CaravanError) -> CaravanError:
    """Ray tells an error of another process with the whole way that it took."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, CaravanError) else error
