"""Processes with models on demand, simulated in one: real stores and streams, fake engines."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import ollama

from model_zoo.store.store import Store
from runtime.errors import ModelUnavailableError, ReplicaLostError
from serve_app.api.bodies import BodyLimits
from serve_app.api.ingress import IngressOptions, ingress_app
from serve_app.api.keys import ApiKey
from serve_app.api.request_images import ImageRules
from serve_app.config.on_demand_settings import OnDemandSettings
from serve_app.config.options import Options
from serve_app.config.settings import ModelSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_management import ModelManagement
from serve_app.gateway.model_registry import ModelRegistry, ServedModel
from serve_app.messages.model_card import ModelCard
from serve_app.on_demand.loader import StoreLoader, find_version
from serve_app.on_demand.model_pool import Loader, MemoryNeed, ModelPool, PoolLimits
from serve_app.on_demand.pooled_model import StoredVersion
from serve_app.on_demand.processes import PoolDirectory
from serve_app.on_demand.store_manager import StoreManager, TransferRules
from serve_app.on_demand.uploads import UploadLimits, Uploads
from serve_app.transport.generation import generation_server
from serve_app.transport.stream_server import StreamServer
from tests.patience import HANG_S
from tests.unit.serve_app.fake_replicas import CARD, OneReplica
from tests.unit.serve_app.on_demand.fake_loader import FakeLoader, card

LIMITS = BodyLimits(1 << 20)


class StoreBackedLoader(FakeLoader):
    """Finds models in a store; each takes `sizes` bytes, by default 10."""

    def __init__(self, store: Store, **sizes: tuple[int, int]) -> None:
        super().__init__(**sizes)
        self.store = store

    def find(self, name: str) -> StoredVersion:
        return find_version(self.store, name)

    def outline(
        self, version: StoredVersion, verbose: bool = False
    ) -> tuple[ModelCard, MemoryNeed]:
        need = MemoryNeed(*self.sizes.get(version.name, (10, 10)))
        return card(version, 0, self.context_tokens), need


@dataclass
class Process:
    """One process. With `alive` False, Serve lists it, but it has ended. `refusal`: why it cannot
    load models. With `awake` cleared it hangs; `calls` counts the calls of it by method. With
    `hold` set, answers to calls wait for that event, and `held` counts them."""

    store_manager: StoreManager
    loader: Any
    server: StreamServer
    alive: bool = True
    refusal: str | None = None
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    calls: Counter[str] = field(default_factory=Counter)
    hold: asyncio.Event | None = None
    held: int = 0

    def __post_init__(self) -> None:
        self.awake.set()

    @property
    def name(self) -> str:
        return self.store_manager.address.replica

    async def die(self) -> None:
        self.alive = False
        await self.server.close(drain_s=0)

    async def answer(self, method: str, *arguments: Any) -> Any:
        self.calls[method] += 1
        if not self.alive:
            raise ReplicaLostError(f"{self.name} has ended")
        if self.refusal is not None:
            raise ModelUnavailableError(self.refusal)
        await self.awake.wait()
        function = {
            "report": self.store_manager.report,
            "call": self.store_manager.call,
        }[method]
        hold = self.hold if method == "call" else None
        answer = await function(*arguments)
        if hold is not None:
            self.held += 1
            await hold.wait()
        return answer


class Cluster:
    """Stands in for the replicas of the deployment."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = list(processes)
        self.awaited = 0

    @property
    def names(self) -> list[str]:
        return [process.name for process in self.processes]

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        (process,) = (each for each in self.processes if each.name == replica)
        return await process.answer(method, *arguments)

    async def await_one(self) -> None:
        self.awaited += 1
        for process in self.processes:
            process.alive = True


@asynccontextmanager
async def cluster_of(
    *roots: Path | Store,
    max_loaded_bytes: int = 100,
    pull_hosts: Sequence[str] = (),
    push_hosts: Sequence[str] | None = None,
    quota_bytes: int = 1 << 30,
    clock: Callable[[], float] = time.monotonic,
    hf_token_for: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    loaders: Callable[[Store], Loader] | None = None,
    **sizes: Any,
) -> AsyncIterator[Cluster]:
    """One process for each of `roots`, the folder of its store; processes may share one.

    `loaders`: by default of fake models, which take `sizes` bytes.
    """
    async with AsyncExitStack() as opened:
        processes = []
        for number, root in enumerate(roots):
            store = root if isinstance(root, Store) else Store(root)
            loader = loaders(store) if loaders else StoreBackedLoader(store, **sizes)
            pool = ModelPool(loader, PoolLimits(max_loaded_bytes))
            opened.push_async_callback(pool.close)
            server = generation_server(pool.generate)
            opened.push_async_callback(server.close, drain_s=0)
            address = changed(await server.start("127.0.0.1"), replica=f"p{number}")
            store_manager = StoreManager(
                pool,
                store,
                Uploads(store, UploadLimits(1 << 24, quota_bytes), clock=clock),
                address,
                rules=TransferRules(pull_hosts, hf_token_for, push_hosts),
                environment=environment,
            )
            opened.push_async_callback(store_manager.close)
            processes.append(Process(store_manager, loader, server))
        yield Cluster(processes)


def fixed_settings(**configured: Any) -> ModelSettings:
    return ModelSettings(**{"name": "fixed", "source": "nowhere.gguf", **configured})


def real_loader(store: Store, **model: Any) -> StoreLoader:
    """The loader of a process with models on demand; `model`: its settings."""
    stated = {"max_sequences": 2, "device": "cpu", "threads": 1, **model}
    settings = OnDemandSettings.model_validate({"model": stated, "max_loaded_bytes": 1 << 30})
    return StoreLoader(settings, {"CARAVAN_MODELS": str(store.root)})


@asynccontextmanager
async def serving(
    cluster: Cluster,
    *,
    managed: bool = True,
    api_keys: tuple[ApiKey, ...] | None = None,
    allowed_origins: tuple[str, ...] = (),
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of an ingress to these processes; `fixed` is a configured model."""
    access: dict[str, Any] = {"api_keys": api_keys, "allowed_origins": allowed_origins}
    async with (
        ingress(cluster, managed=managed, **access) as transport,
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


@asynccontextmanager
async def official(cluster: Cluster, **configured: Any) -> AsyncIterator[ollama.AsyncClient]:
    """Ollama's client of such an ingress; `configured`: settings of `fixed`."""
    async with ingress(cluster, **configured) as transport:
        yield ollama.AsyncClient("http://test", transport=transport)


@asynccontextmanager
async def ingress(
    cluster: Cluster,
    *,
    managed: bool = True,
    api_keys: tuple[ApiKey, ...] | None = None,
    allowed_origins: tuple[str, ...] = (),
    body_limits: BodyLimits = LIMITS,
    **configured: Any,
) -> AsyncIterator[httpx.ASGITransport]:
    pool = PoolDirectory(cluster)
    fixed = changed(CARD, name="fixed")
    replicas = {"fixed": OneReplica(None, fixed)}  # type: ignore[arg-type]
    registry = ModelRegistry([ServedModel("fixed", Options())], replicas, pool=pool)
    backend = ChatBackend(registry, start_timeout_s=HANG_S)
    management = None
    if managed:
        management = ModelManagement(pool, [fixed_settings(**configured)], start_timeout_s=HANG_S)
    app = ingress_app(
        backend,
        IngressOptions(
            api_keys=api_keys,
            allowed_origins=allowed_origins,
            body_limits=body_limits,
            image_rules=ImageRules(),
        ),
        management,
    )
    try:
        yield httpx.ASGITransport(app, raise_app_exceptions=False)
    finally:
        backend.close()
        pool.close()
