"""The models that can be served, configured or stored, and the replicas that serve each one."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.errors import ModelNotFoundError, ModelUnavailableError
from serve_app.config.options import Options
from serve_app.config.settings import ModelSettings, canonical_name
from serve_app.gateway.allowed_models import AllowedModels
from serve_app.gateway.schedulability import BuildFacts, Schedulability
from serve_app.logs import get_logger
from serve_app.messages.listing import ListedModel, LoadedModel, merge_loaded, unpulled_model
from serve_app.messages.model_card import ModelCard
from serve_app.messages.replica_status import ReplicaStatus
from serve_app.messages.tasks import ChatTask, Conversation, RawText, Task
from serve_app.on_demand.processes import PoolDirectory
from serve_app.transport.wire import Address

# The name in `Schedulability` of the deployment for models on demand; no model can have it.
ON_DEMAND = "models on demand"
LISTING_TIMEOUT_S = 3.0
# Limit for starting a process with models on demand, if none has ever reported its store.
WAKING_TIMEOUT_S = 30.0
# Clients poll the lists, and each query calls every replica of every configured model.
LOADED_LIFE_S = 1.0

log = get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the default options of its requests.

    `brings_options`: the model may have options of its own, which only a replica knows.
    """

    name: str
    options: Options
    brings_options: bool = False


def configured_model(settings: ModelSettings, listed: ListedModel | None) -> ServedModel:
    """A configured model, with the options of its file if that was there when it was `listed`. A
    model in a store may be another version when a replica starts."""
    if listed is None or not settings.is_a_path:
        return ServedModel(settings.name, settings.options, brings_options=True)
    return ServedModel(settings.name, settings.options.over(listed.options))


class ModelReplicas(Protocol):
    """The replicas of one configured model; see serve_app.routing.replica_set.ReplicaSet."""

    async def choose(
        self, task: Task, *, avoid: frozenset[str] = frozenset(), identity: str | None = None
    ) -> Address: ...

    async def choose_earlier(
        self, task: Task, *, avoid: frozenset[str] = frozenset()
    ) -> Address | None: ...

    async def describe(self, *, verbose: bool) -> ModelCard: ...

    async def ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]: ...


class ModelRegistry:
    """Finds models by name and chooses replicas for their tasks.

    `models`: the configured models, which hide stored models of the same name. `replicas`: those of
    each configured model, by name. `defaults`: options of requests to models that are not
    configured. `pool`: None without `on_demand`. `facts`: about the models, from when the
    application was built.
    """

    def __init__(
        self,
        models: Iterable[ServedModel],
        replicas: Mapping[str, ModelReplicas],
        *,
        defaults: Options | None = None,
        pool: PoolDirectory | None = None,
        facts: BuildFacts | None = None,
        schedulability: Schedulability | None = None,
    ) -> None:
        self._configured = {canonical_name(model.name): model for model in models}
        self._replicas = replicas
        self._defaults = defaults or Options()
        self._pool = pool
        facts = facts or BuildFacts()
        self._encoders = facts.encoders
        self._listed = dict(facts.known)  # configured models, as last reported
        self._loaded: dict[str, list[LoadedModel]] = {}  # by configured model, as last reported
        self._querying: asyncio.Task[None] | None = None  # the latest query, also if it has ended
        self._queried_at = 0.0
        self._schedulability = schedulability
        self._unload_logged: set[str] = set()

    @property
    def configured(self) -> list[str]:
        return [*self._replicas]

    async def find(self, name: str, allowed: AllowedModels) -> ServedModel:
        """Raises the same ModelNotFoundError for unknown models and for those that are not allowed,
        so that a client cannot detect which models exist."""
        served = self._configured.get(canonical_name(name)) or await self._find_stored(name)
        if served is None or served.name not in allowed:
            raise ModelNotFoundError(f"model '{name}' not found")
        return served

    async def listed(self, allowed: AllowedModels) -> list[ListedModel]:
        """The allowed models that can be served, newest first."""
        stored = [
            model
            for model in await self._list_stored()
            if canonical_name(model.name) not in self._configured
        ]
        models = [*await self._list_configured(), *stored]
        models = [model for model in models if model.name in allowed]
        return sorted(models, key=lambda model: model.modified_at, reverse=True)

    async def loaded(self, allowed: AllowedModels) -> list[LoadedModel]:
        """The allowed models that are loaded in any process, in descending order of expiry."""
        loaded = [each for found in (await self._query_loaded()).values() for each in found]
        if self._pool is not None:
            loaded += await self._pool.loaded()
        return merge_loaded(each for each in loaded if each.model.name in allowed)

    async def statuses(self) -> list[ReplicaStatus]:
        """The statuses of the replicas and of the processes with models on demand that answer in
        time."""
        calls: list[Awaitable[list[Any] | None]] = [
            _ask_all(replicas, "status") for replicas in self._replicas.values()
        ]
        if self._pool is not None:
            calls.append(self._pool.statuses())
        answers = await asyncio.gather(*calls)
        return [
            each for found in answers for each in found or () if isinstance(each, ReplicaStatus)
        ]

    async def choose(
        self, task: Task, *, avoid: frozenset[str] = frozenset(), identity: str | None = None
    ) -> Address:
        """The replica for the task; waits until there is one.

        A replica named in `avoid` is chosen only if there is no other, and one that cannot serve
        the task only after those: it could not load its model, or `Address.model` is not
        `identity`, if stated. Raises ModelUnavailableError as soon as no node can host a replica.
        """
        async with self._schedulable(task.model):
            replicas = self._replicas.get(task.model)
            if replicas is None:
                return await self._on_demand.choose(task, avoid=avoid, identity=identity)
            encoder = self._encoders.get(task.model)
            if self._schedulability is not None and encoder is not None and _has_images(task):
                self._schedulability.check(encoder)
            return await replicas.choose(task, avoid=avoid, identity=identity)

    async def choose_earlier(
        self, task: Task, *, avoid: frozenset[str] = frozenset()
    ) -> Address | None:
        """A replica that would start a queued task far earlier, never one of `avoid`.

        None for models on demand: another process would have to load the model first.
        """
        replicas = self._replicas.get(task.model)
        return None if replicas is None else await replicas.choose_earlier(task, avoid=avoid)

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        """The card from any replica that has loaded the model; waits until there is one."""
        async with self._schedulable(model):
            replicas = self._replicas.get(model)
            if replicas is None:
                return await self._on_demand.describe(model, verbose=verbose)
            return await replicas.describe(verbose=verbose)

    async def load(self, model: str, keep_alive_s: float | None, *, tenant: str) -> None:
        """Loads a model on demand; returns when it is loaded. Configured models stay loaded."""
        if model not in self._replicas:
            async with self._schedulable(model):
                await self._on_demand.load(model, keep_alive_s, tenant=tenant)

    async def unload(self, model: str) -> None:
        """Configured models stay loaded. That is not an error, because `ollama stop` and other
        clients would fail; it is logged once for each model."""
        if model not in self._replicas:
            await self._on_demand.unload(model)
        elif model not in self._unload_logged:
            self._unload_logged.add(model)
            log.info("not unloaded", model=model, reason="the configuration keeps it loaded")

    async def _find_stored(self, name: str) -> ServedModel | None:
        if self._pool is None:
            return None
        async with self._schedulable(ON_DEMAND):
            stored = await self._pool.find(name)
        if stored is None:
            return None
        return ServedModel(stored.name, self._defaults.over(stored.options))

    async def _list_configured(self) -> list[ListedModel]:
        """The configured models, as their replicas report or last reported them, otherwise from the
        headers of their files. Only the name is known of files that are not pulled yet."""
        loaded = await self._query_loaded()
        self._listed |= {name: found[0].model for name, found in loaded.items() if found}
        return [self._listed.get(name) or unpulled_model(name) for name in self._replicas]

    async def _list_stored(self) -> Sequence[ListedModel]:
        """The stored models, as last reported if no process runs. Starts a process if none has ever
        reported."""
        if self._pool is None:
            return []
        try:
            async with asyncio.timeout(WAKING_TIMEOUT_S), self._schedulable(ON_DEMAND):
                await self._pool.wait_for_stores()
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                return await self._pool.listed()
        except (TimeoutError, ModelUnavailableError):
            return self._pool.last_listed

    async def _query_loaded(self) -> dict[str, list[LoadedModel]]:
        """The loaded models of each configured model's replicas that answer in time; if none does,
        as last reported. At most LOADED_LIFE_S old; concurrent callers share a query."""
        now = asyncio.get_running_loop().time()
        outdated = now - self._queried_at > LOADED_LIFE_S
        if self._querying is None or (outdated and self._querying.done()):
            self._queried_at = now
            self._querying = asyncio.create_task(self._update_loaded())
        await asyncio.shield(self._querying)
        return {name: self._loaded.get(name, []) for name in self._replicas}

    async def _update_loaded(self) -> None:
        calls = [_ask_all(replicas, "loaded") for replicas in self._replicas.values()]
        for name, answers in zip(self._replicas, await asyncio.gather(*calls), strict=True):
            if answers is not None:
                self._loaded[name] = [each for each in answers if isinstance(each, LoadedModel)]

    @property
    def _on_demand(self) -> PoolDirectory:
        assert self._pool is not None, "only `find` of a pool names models that are not configured"
        return self._pool

    def _schedulable(self, model: str) -> AbstractAsyncContextManager[None]:
        if self._schedulability is None:
            return nullcontext()
        return self._schedulability.wait_schedulable(
            model if model in self._replicas else ON_DEMAND
        )


def _has_images(task: Task) -> bool:
    if not isinstance(task, ChatTask):
        return False
    match task.prompt:
        case Conversation(messages):
            return any(message.images for message in messages)
        case RawText(images=images):
            return bool(images)
    return False


async def _ask_all(replicas: ModelReplicas, method: str) -> list[Any] | None:
    """The answers of the replicas that answer in time; None if there are others only."""
    try:
        return await replicas.ask_all(method, timeout_s=LISTING_TIMEOUT_S)
    except TimeoutError:
        return None
