"""Processes with models on demand, in this one: real stores and streams, pretend engines."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import ollama

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import ModelNotFoundError, SourceError, StoreError
from serve_app.api.bodies import BodyLimits
from serve_app.api.ingress import ingress_app
from serve_app.api.keys import ApiKey
from serve_app.api.request_images import ImageRules
from serve_app.config.options import Options
from serve_app.config.settings import ModelSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.catalogue import Catalogue, ServedModel
from serve_app.gateway.directory import ModelDirectory
from serve_app.gateway.model_card import ModelCard
from serve_app.on_demand.loader import StoreLoader
from serve_app.on_demand.management import Management
from serve_app.on_demand.model_pool import Found, Limits, Loader, ModelPool, Sizes
from serve_app.on_demand.processes import PoolDirectory
from serve_app.on_demand.settings import OnDemandSettings
from serve_app.on_demand.store_manager import StoreManager
from serve_app.on_demand.uploads import UploadLimits
from serve_app.transport.server import StreamServer
from tests.patience import HANG_S
from tests.unit.serve_app.pretend import CARD, Loaded, OneReplica
from tests.unit.serve_app.pretend_loader import PretendLoader, card


class StoreBackedLoader(PretendLoader):
    """Finds models in a store; each takes as many bytes as `sizes` says, or 10."""

    def __init__(self, store: Store, **sizes: tuple[int, int]) -> None:
        super().__init__(**sizes)
        self.store = store

    def find(self, name: str) -> Found:
        try:
            known = self.store.find(ModelName.parse(name))
            if known is not None:
                return Found(str(known), self.store.manifest(known).digest)
        except (SourceError, StoreError):
            pass
        raise ModelNotFoundError(f"model '{name}' not found")

    def outline(self, found: Found, verbose: bool = False) -> tuple[ModelCard, Sizes]:
        return card(found, 0), Sizes(*self.sizes.get(found.name, (10, 10)))


@dataclass
class Process:
    """One of them; `alive` False: it is gone, and nobody has noticed."""

    store_manager: StoreManager
    loader: Any
    server: StreamServer
    alive: bool = True

    async def die(self) -> None:
        self.alive = False
        await self.server.close(drain_s=0)


class Cluster:
    """All processes, as Serve's handle would ask them; `asked` counts the broadcasts by method."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = list(processes)
        self.asked: dict[str, int] = {}
        self.awaited = 0

    async def ask(self, method: str, *arguments: Any, timeout_s: float | None) -> list[Any]:
        self.asked[method] = self.asked.get(method, 0) + 1
        living = [process for process in self.processes if process.alive]
        if method == "report":
            return [await process.store_manager.report() for process in living]
        replicas, command = arguments
        chosen = [p for p in living if p.store_manager.address.replica in replicas]
        return [await p.store_manager.answer(command) for p in chosen]

    async def await_one(self) -> None:
        self.awaited += 1
        for process in self.processes:
            process.alive = True


@asynccontextmanager
async def cluster_of(
    *roots: Path | Store,
    max_loaded_bytes: int = 100,
    pull_hosts: Sequence[str] = (),
    quota_bytes: int = 1 << 30,
    clock: Callable[[], float] = time.monotonic,
    hf_token_for: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    loaders: Callable[[Store], Loader] | None = None,
    **sizes: Any,
) -> AsyncIterator[Cluster]:
    """A process for each of `roots`, where its store is; equal ones are shared.

    `loaders`: of the models, by default of pretend ones, which take what `sizes` says.
    """
    async with AsyncExitStack() as opened:
        processes = []
        for number, root in enumerate(roots):
            store = root if isinstance(root, Store) else Store(root)
            loader = loaders(store) if loaders else StoreBackedLoader(store, **sizes)
            pool = ModelPool(loader, Limits(max_loaded_bytes))
            opened.push_async_callback(pool.close)
            server = StreamServer(pool.generate)
            opened.push_async_callback(server.close, drain_s=0)
            address = changed(await server.start("127.0.0.1"), replica=f"p{number}")
            store_manager = StoreManager(
                pool,
                store,
                address,
                pull_hosts=pull_hosts,
                uploads=UploadLimits(file_bytes=1 << 24, quota_bytes=quota_bytes),
                hf_token_for=hf_token_for,
                environment=environment,
                clock=clock,
            )
            opened.callback(store_manager.close)
            processes.append(Process(store_manager, loader, server))
        yield Cluster(processes)


def fixed_settings(**configured: Any) -> ModelSettings:
    return ModelSettings(**{"name": "fixed", "source": "nowhere.gguf", **configured})


def real_loader(store: Store, **model: Any) -> StoreLoader:
    """Loads models as a process with models on demand does; `model` as in its settings."""
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
    """An HTTP client of an ingress before these processes; `fixed` is a configured model."""
    access: dict[str, Any] = {"api_keys": api_keys, "allowed_origins": allowed_origins}
    async with (
        ingress(cluster, managed=managed, **access) as transport,
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


@asynccontextmanager
async def official(cluster: Cluster, **configured: Any) -> AsyncIterator[ollama.AsyncClient]:
    """Ollama's own client of such an ingress; `configured`: what is said of `fixed`."""
    async with ingress(cluster, **configured) as transport:
        yield ollama.AsyncClient("http://test", transport=transport)


@asynccontextmanager
async def ingress(
    cluster: Cluster,
    *,
    managed: bool = True,
    api_keys: tuple[ApiKey, ...] | None = None,
    allowed_origins: tuple[str, ...] = (),
    **configured: Any,
) -> AsyncIterator[httpx.ASGITransport]:
    pool = PoolDirectory(cluster)
    fixed = changed(CARD, name="fixed")
    directory = ModelDirectory(OneReplica(None, fixed), {"fixed": Loaded(fixed)}, pool=pool)  # type: ignore[arg-type]
    catalogue = Catalogue([ServedModel("fixed", Options())], directory)
    backend = ChatBackend(catalogue, directory, start_timeout_s=HANG_S)
    app = ingress_app(
        backend,
        Management(pool, [fixed_settings(**configured)]) if managed else None,
        api_keys=api_keys,
        allowed_origins=allowed_origins,
        body_limits=BodyLimits(1 << 20),
        image_rules=ImageRules(),
    )
    try:
        yield httpx.ASGITransport(app, raise_app_exceptions=False)
    finally:
        backend.close()
        pool.close()
