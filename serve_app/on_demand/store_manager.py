"""What a process with models on demand is asked beside answering: lists, loads, pulls."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from model_zoo.convert.recipes import recipe_named
from model_zoo.sources.hub import without_token
from model_zoo.sources.pull import Progress, pull
from model_zoo.sources.reference import HubSource, PathSource, RemoteSource, Source
from model_zoo.store.creation import copy, create
from model_zoo.store.definition import Definition
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import (
    CaravanError,
    ConfigurationError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    SourceError,
    SourceNotFoundError,
)
from serve_app.config.model_sources import requested_source, sound_name
from serve_app.logs import get_logger
from serve_app.on_demand.commands import (
    Abort,
    Answer,
    Append,
    Command,
    Copy,
    Create,
    Describe,
    Finish,
    Follow,
    Holds,
    Listing,
    Load,
    Pull,
    Remove,
    Unload,
    Upload,
)
from serve_app.on_demand.definitions import blob_digest
from serve_app.on_demand.model_pool import ModelPool
from serve_app.on_demand.operations import Operations
from serve_app.on_demand.report import PoolReport
from serve_app.on_demand.stored import StoredModels
from serve_app.on_demand.uploads import UploadLimits, Uploads
from serve_app.transport import wire
from serve_app.transport.wire import Address

IDENTITY = "identity"
SWEEP_EVERY_S = 300.0

log = get_logger()


class StoreManager:
    """One process's models and its store. `pull_hosts`: from where clients may have models pulled.

    `hf_token_for`: repositories of the Hub that the server's token is used for then, as `org/repo`
    or with `*`. Files of configured models are pulled with it in any case.
    `clock`: monotonic seconds, for uploads without progress.
    """

    def __init__(
        self,
        pool: ModelPool,
        store: Store,
        address: Address,
        *,
        pull_hosts: Sequence[str],
        hf_token_for: Sequence[str],
        uploads: UploadLimits,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.address = address
        self._store = store
        self._pull_hosts = frozenset(host.lower() for host in pull_hosts)
        self._hf_token_for = tuple(pattern.lower() for pattern in hf_token_for)
        self._environment = environment
        self._stored = StoredModels(store)
        self._operations = Operations()
        self._uploads = Uploads(store, uploads, clock=clock)
        self._unswept = ""  # why, where the last sweep failed
        self._identity = store_identity(store)

    async def report(self) -> PoolReport:
        version = await asyncio.to_thread(self._stored.version)
        limits = self.pool.limits
        return PoolReport(
            address=self.address,
            store=self._identity,
            listing=version,
            capacity_bytes=limits.max_loaded_bytes,
            free_bytes=self.pool.free_bytes,
            most_models=limits.max_models,
            residents=self.pool.residents(),
        )

    async def answer(self, command: Command) -> Answer:
        replica = self.address.replica
        try:
            return Answer(replica, await self._done(command))
        except Exception as error:
            if not isinstance(error, RequestError | ModelNotFoundError | OverloadedError):
                # Clients are told less: no directories, and nothing of errors that are not ours.
                log.warning("command failed", command=type(command).__name__, reason=repr(error))
            return Answer(replica, failed=wire.failed(error))

    async def sweep_periodically(self) -> None:
        """Never ends by itself."""
        while True:
            await asyncio.to_thread(self.sweep)
            await asyncio.sleep(SWEEP_EVERY_S)

    def sweep(self) -> None:
        """Removes uploads and downloads without progress, and blobs that no model uses."""
        try:
            self._uploads.drop_stale()
            freed = self._store.remove_unused()
            self._uploads.forget_used()
        except (CaravanError, OSError) as error:
            if str(error) != self._unswept:
                self._unswept = str(error)
                log.warning("store not swept", reason=self._unswept)
            return
        self._unswept = ""
        if freed:
            log.info("unused files removed", store=str(self._store.root), bytes=freed)

    def close(self) -> None:
        self._operations.close()
        self._uploads.close()

    async def _done(self, command: Command) -> Any:
        match command:
            case Describe(model, verbose):
                return await self.pool.describe(model, verbose=verbose)
            case Load(model, keep_alive_s, tenant):
                return await self.pool.load(model, keep_alive_s, tenant)
            case Unload(model):
                return await self.pool.unload(str(sound_name(model)))
            case Remove(model):
                await self.pool.unload(str(sound_name(model)))
        return await asyncio.to_thread(self._kept, command)

    def _kept(self, command: Command) -> Any:
        """In a thread: disks take their time."""
        match command:
            case Listing():
                return self._stored.listed()
            case Pull(text):
                return self._pull(text)
            case Create(name, definition, configured):
                return self._create(name, definition, configured)
            case Follow(operation, after):
                return self._operations.follow(operation, after)
            case Copy(source, destination):
                copy(self._known(source), sound_name(destination), self._store)
            case Remove(model):
                self._store.remove(self._known(model))
            case Holds(digest):
                return self._store.blob(blob_digest(digest)).is_file()
            case Upload(upload, digest, size, tenant):
                self._uploads.begin(upload, digest, size, tenant)
            case Append(upload, offset, data):
                self._uploads.append(upload, offset, data)
            case Finish(upload):
                self._uploads.finish(upload)
            case Abort(upload):
                self._uploads.abort(upload)
        return None

    def _pull(self, text: str) -> str:
        source = self._allowed(requested_source(text, self._store))

        tokened = self._is_tokened(source)

        def work(progress: Progress) -> None:
            with _pulling(source, tokened):
                pull(source, self._store, progress=progress, environment=self._pulls_with(tokened))

        return self._operations.begin(f"pull {source}", work)

    def _create(self, text: str, definition: Definition, configured: bool) -> str:
        name = sound_name(text)
        if definition.quantize is not None:
            _check_recipe(definition.quantize)
        if configured:
            _check_file(definition.base)
        else:
            self._check_base(definition.base)
        tokened = configured or self._is_tokened(definition.base)

        def work(progress: Progress) -> None:
            with _pulling(definition.base, tokened):
                create(
                    name,
                    definition,
                    self._store,
                    progress=progress,
                    environment=self._pulls_with(tokened),
                )

        return self._operations.begin(f"create {name} {definition!r}", work)

    def _check_base(self, base: Source | None) -> None:
        assert not isinstance(base, PathSource), "no request names a file of the server"
        if base is not None and self._store.find(base.name) is None:
            self._allowed(base)

    def _allowed(self, source: RemoteSource) -> RemoteSource:
        host = source.name.host
        if host.lower() not in self._pull_hosts:
            raise RequestError(
                f"{source}: models are not pulled from {host} here; `on_demand.pull_hosts` says "
                f"from where they are: {', '.join(sorted(self._pull_hosts))}"
            )
        return source

    def _is_tokened(self, source: Source | None) -> bool:
        """Whether the server's token may be used for a client's pull of this source."""
        if not isinstance(source, HubSource):
            return False
        repository = f"{source.organisation}/{source.repository}".lower()
        return any(fnmatchcase(repository, pattern) for pattern in self._hf_token_for)

    def _pulls_with(self, tokened: bool) -> Mapping[str, str]:
        return self._environment if tokened else without_token(self._environment)

    def _known(self, text: str) -> ModelName:
        known = self._store.find(sound_name(text))
        if known is None:
            raise ModelNotFoundError(f"model '{text}' not found")
        return known


@contextmanager
def _pulling(source: Source | None, tokened: bool) -> Iterator[None]:
    """Report a model that its source lacks in Ollama's words, which clients look for."""
    try:
        yield
    except SourceNotFoundError as error:
        remedy = ""
        if isinstance(source, HubSource) and not tokened:
            remedy = " The server's own token is used for `on_demand.hf_token_for` alone."
        raise SourceError(f"pull model manifest: file does not exist: {error}{remedy}") from None


def _check_file(base: Source | None) -> None:
    """ModelNotFoundError where the file of a configured model is not on this machine."""
    if isinstance(base, PathSource) and not base.path.absolute().is_file():
        raise ModelNotFoundError(
            f"{base.path.name}: there is no such file on {os.uname().nodename}, whose store was to "
            "get the new model; configured models with a path need the file on every node"
        )


def _check_recipe(name: str) -> None:
    try:
        recipe_named(name)
    except ConfigurationError as error:
        raise RequestError(str(error)) from None


def store_identity(store: Store) -> str:
    """Equal for processes that share a store, wherever they see it; it is in a file of the store.

    Of one that cannot be written, where it lies on this machine.
    """
    path = store.root / IDENTITY
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        temporary = store.root / f".{IDENTITY}-{uuid.uuid4().hex}"
        temporary.write_text(uuid.uuid4().hex)
        try:
            os.link(temporary, path)  # whoever comes first decides
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        return path.read_text().strip()
    except OSError:
        return _place(store.root)


def _place(root: Path) -> str:
    machine = Path("/etc/machine-id")
    known = machine.read_text().strip() if machine.is_file() else os.uname().nodename
    return f"{known}:{root.resolve()}"
