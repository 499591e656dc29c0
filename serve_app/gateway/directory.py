"""Who serves what: configured models by deployments of their own, all others on demand."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from runtime.errors import CaravanError, ModelUnavailableError
from serve_app.gateway.listing import ListedModel, LoadedModel, unknown
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.schedulability import Schedulability
from serve_app.gateway.tasks import ChatTask, Conversation, RawText, Task
from serve_app.logs import get_logger
from serve_app.on_demand.processes import Everyone, PoolDirectory
from serve_app.transport.wire import Address

# The name of the deployment for models on demand, as `Schedulability` knows it; no model's name.
ON_DEMAND = "models on demand"
LISTING_TIMEOUT_S = 3.0
# Where all processes with models on demand sleep, and none has ever told its store.
WAKING_TIMEOUT_S = 30.0

log = get_logger()


class Configured(Protocol):
    """See serve_app.routing.replica_set.HandleDirectory."""

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address: ...
    async def better(
        self, task: Task, *, avoid: frozenset[str] = frozenset()
    ) -> Address | None: ...
    async def describe(self, model: str, *, verbose: bool) -> ModelCard: ...


class ModelDirectory:
    """See backend.Directory and catalogue.Lists.

    `replicas`: of each configured model. `known`: what their files say, where that could be seen
    when the application was built. `encoders`: the name in `Schedulability` of each model's encoder
    deployment, of models with an encoder pool. `pool`: None without `on_demand`.
    """

    def __init__(
        self,
        configured: Configured,
        replicas: Mapping[str, Everyone],
        *,
        known: Mapping[str, ListedModel] | None = None,
        encoders: Mapping[str, str] | None = None,
        pool: PoolDirectory | None = None,
        placement: Schedulability | None = None,
    ) -> None:
        self._configured = configured
        self._replicas = replicas
        self._known = dict(known or {})
        self._loaded: dict[str, list[LoadedModel]] = {}
        self._encoders = encoders or {}
        self._pool = pool
        self._placement = placement
        self._kept: set[str] = set()  # configured models that somebody wanted unloaded

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address:
        async with self._schedulable(task.model):
            if self._is_configured(task.model):
                self._refuse_unseen(task)
                return await self._configured.choose(task, avoid=avoid)
            return await self._on_demand.choose(task, avoid=avoid)

    async def better(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address | None:
        """A model on demand is nowhere else unless it is loaded there first."""
        if not self._is_configured(task.model):
            return None
        return await self._configured.better(task, avoid=avoid)

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        async with self._schedulable(model):
            if not self._is_configured(model):
                return await self._on_demand.describe(model, verbose=verbose)
            try:
                return await self._configured.describe(model, verbose=verbose)
            except CaravanError as error:
                card = await self._any_card(model, verbose)
                if card is None:
                    raise _plain(error) from None
                return card

    async def load(self, model: str, keep_alive_s: float | None, *, tenant: str) -> None:
        if self._is_configured(model):
            await self.describe(model, verbose=False)
            return
        async with self._schedulable(model):
            await self._on_demand.load(model, keep_alive_s, tenant=tenant)

    async def unload(self, model: str) -> None:
        """Does nothing to a configured model: `ollama stop` and others would fail if it were an
        error. It is logged once for each model."""
        if not self._is_configured(model):
            await self._on_demand.unload(model)
        elif model not in self._kept:
            self._kept.add(model)
            log.info("not unloaded", model=model, reason="the configuration keeps it loaded")

    async def configured(self) -> list[ListedModel]:
        """Those that run as they say it, or said it before they slept; the others as their files
        do. Of files that nobody has pulled yet nothing is known but what they are asked for by."""
        running = await self._running()
        self._known |= {name: loaded[0].model for name, loaded in running.items() if loaded}
        return [self._known.get(name) or unknown(name) for name in self._replicas]

    async def stored(self) -> Sequence[ListedModel]:
        """Of processes that sleep, what they told last; where none ever has, one is woken."""
        if self._pool is None:
            return []
        try:
            async with asyncio.timeout(WAKING_TIMEOUT_S), self._schedulable(ON_DEMAND):
                await self._pool.know_stores()
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                return await self._pool.listed()
        except (TimeoutError, ModelUnavailableError):
            return self._pool.last_listed

    async def find_stored(self, name: str) -> ListedModel | None:
        if self._pool is None:
            return None
        async with self._schedulable(name):
            return await self._pool.find(name)

    async def loaded(self) -> list[LoadedModel]:
        own = [loaded for found in (await self._running()).values() for loaded in found]
        return own if self._pool is None else [*own, *await self._pool.loaded()]

    async def _any_card(self, model: str, verbose: bool) -> ModelCard | None:
        """Of whichever replica can tell one, where another cannot: it has not loaded the model."""
        told = await _told_by(self._replicas[model], "describe", verbose)
        return next((card for card in told or [] if isinstance(card, ModelCard)), None)

    async def _running(self) -> dict[str, list[LoadedModel]]:
        """What all replicas of all configured models have loaded; where one of them is silent,
        what was last told of the model."""
        asked = [_told_by(replicas, "loaded") for replicas in self._replicas.values()]
        for name, told in zip(self._replicas, await asyncio.gather(*asked), strict=True):
            if told is not None:
                self._loaded[name] = [each for each in told if isinstance(each, LoadedModel)]
        return {name: self._loaded.get(name, []) for name in self._replicas}

    def _is_configured(self, model: str) -> bool:
        return model in self._replicas

    def _refuse_unseen(self, task: Task) -> None:
        """Images that nobody can encode are told so now, not when they were waited for in vain."""
        if self._placement is not None and task.model in self._encoders and _shows_images(task):
            self._placement.refuse(self._encoders[task.model])

    @property
    def _on_demand(self) -> PoolDirectory:
        assert self._pool is not None, "the catalogue knows no model that nobody could load"
        return self._pool

    def _schedulable(self, model: str) -> AbstractAsyncContextManager[None]:
        if self._placement is None:
            return nullcontext()
        return self._placement.schedulable(model if self._is_configured(model) else ON_DEMAND)


def _shows_images(task: Task) -> bool:
    if not isinstance(task, ChatTask):
        return False
    match task.prompt:
        case Conversation(messages):
            return any(message.images for message in messages)
        case RawText(images=images):
            return bool(images)
    return False


async def _told_by(replicas: Everyone, method: str, *arguments: Any) -> list[Any] | None:
    """None: one of them has not answered in time."""
    try:
        return await replicas.ask(method, *arguments, timeout_s=LISTING_TIMEOUT_S)
    except TimeoutError:
        return None


def _plain(error: CaravanError) -> CaravanError:
    """Ray tells an error of another process with the whole way that it took."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, CaravanError) else error
