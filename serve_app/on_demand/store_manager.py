"""The operations of one process with models on demand: its model pool and its store.

For each store, the ingress calls one of the processes that share it. A named Ray actor per store
would not be simpler: it ends with its creator or, detached, outlives the application, and its calls
continue when their caller dies, so operations would need the same lease.
"""

import asyncio
import hashlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import iscoroutinefunction
from operator import attrgetter
from pathlib import Path
from typing import Any

from model_zoo.convert.recipes import recipe_named
from model_zoo.sources.hub import without_token
from model_zoo.sources.pull import Progress, pull
from model_zoo.sources.push import push
from model_zoo.sources.reference import HubSource, PathSource, RemoteSource, Source
from model_zoo.store.creation import copy, create
from model_zoo.store.definition import Definition
from model_zoo.store.manifest import ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.engine.engine_statistics import EngineStatistics
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
from serve_app.logs import get_logger, without_texts
from serve_app.messages.replica_status import ReplicaStatus
from serve_app.on_demand.definitions import blob_digest
from serve_app.on_demand.model_pool import ModelPool
from serve_app.on_demand.report import CallResult, PoolReport
from serve_app.on_demand.store_operations import Operations
from serve_app.on_demand.stored_models import StoredModels
from serve_app.on_demand.uploads import Uploads
from serve_app.transport import wire
from serve_app.transport.wire import Address

IDENTITY = "identity"
SWEEP_EVERY_S = 300.0

log = get_logger()


@dataclass(frozen=True, slots=True)
class TransferRules:
    """Rules for clients' pulls and pushes.

    `hosts`: hosts to pull from. `push_hosts`: hosts to push to; None: `hosts`.
    `hf_token_for`: repositories of the Hub, as `org/repo` with `*` as a wildcard, for which pulls
    use the server's token. Sources of configured models are always allowed and always pulled with
    the token.
    """

    hosts: Sequence[str]
    hf_token_for: Sequence[str] = ()
    push_hosts: Sequence[str] | None = None

    def check(self, source: RemoteSource) -> RemoteSource:
        """The source. RequestError if its host is not allowed."""
        host = source.name.host
        if not _contains(self.hosts, host):
            raise RequestError(
                f"{source}: pulls from {host} are not allowed; `on_demand.pull_hosts` allows "
                f"{', '.join(sorted(self.hosts)) or 'none'}"
            )
        return source

    def check_push(self, name: ModelName) -> None:
        """RequestError if models may not be pushed to the host of the name."""
        hosts = self.hosts if self.push_hosts is None else self.push_hosts
        if not _contains(hosts, name.host):
            raise RequestError(
                f"{name}: pushes to {name.host} are not allowed; `on_demand.push_hosts` allows "
                f"{', '.join(sorted(hosts)) or 'none'}"
            )

    def allow_token(self, source: Source | None) -> bool:
        if not isinstance(source, HubSource):
            return False
        repository = f"{source.organisation}/{source.repository}".lower()
        return any(fnmatchcase(repository, pattern.lower()) for pattern in self.hf_token_for)


class StoreManager:
    """The pool, uploads, operations and list of models of one process, called by the ingress."""

    def __init__(
        self,
        pool: ModelPool,
        store: Store,
        uploads: Uploads,
        address: Address,
        *,
        rules: TransferRules,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.pool = pool
        self.address = address
        self.uploads = uploads
        self.operations = Operations()
        self.models = StoredModels(store)
        self._store = store
        self._rules = rules
        self._environment = environment
        self._sweep_error = ""
        self._mapped: set[ManifestLayer] = set()  # blobs of removed models
        self._followed = ""  # the version of the list for which the pool is up to date
        self._identity = store_identity(store)

    async def report(self) -> PoolReport:
        version = await self._retire_outdated()
        return PoolReport(
            address=self.address,
            store=self._identity,
            listing=version,
            free_bytes=self.pool.free_bytes,
            most_models=self.pool.limits.max_models,
            residents=self.pool.residents(),
        )

    def check(self) -> None:
        """As that of the pool."""
        self.pool.check()

    async def status(self) -> ReplicaStatus:
        return ReplicaStatus.of(self.address.replica, self.statistics())

    def statistics(self) -> dict[str, EngineStatistics]:
        """Of the loaded models, by name."""
        return self.pool.statistics()

    def measures(self) -> dict[str, float]:
        """Load metrics for autoscaling."""
        running = self.operations.running + self.uploads.running
        return {**self.pool.measures(), "operations": float(running)}

    async def call(self, method: str, *arguments: Any) -> CallResult:
        """Calls a method by its path from here, such as "pull" or "uploads.append".

        Methods that are not coroutines access the disk, so they run in a thread.
        """
        replica = self.address.replica
        try:
            function = attrgetter(method)(self)
            if iscoroutinefunction(function):
                return CallResult(replica, await function(*arguments))
            return CallResult(replica, await asyncio.to_thread(function, *arguments))
        except Exception as error:
            if not isinstance(error, RequestError | ModelNotFoundError | OverloadedError):
                # Clients do not get these messages in full, because they may name directories.
                known = isinstance(error, CaravanError)
                facts = {"reason": repr(error)} if known else without_texts(error)
                log.warning("call failed", method=method, **facts)
            return CallResult(replica, failed=wire.failed(error))

    def pull(self, id: str, text: str, insecure: bool = False) -> None:
        """Begins or joins the pull of the model that `text` names, as operation `id`."""
        source = self._rules.check(requested_source(text, self._store))
        with_token = self._rules.allow_token(source)

        def work(progress: Progress) -> None:
            environment = self._pull_environment(with_token)
            with _ollama_errors(source, with_token):
                pull(
                    source,
                    self._store,
                    progress=progress,
                    environment=environment,
                    insecure=insecure,
                )

        self.operations.begin(id, f"pull {source}", work, variant=str(insecure))

    def push(self, id: str, text: str, insecure: bool = False) -> None:
        """Begins or joins the push of a model to the registry that its name begins with, as
        operation `id`. ModelNotFoundError if the store does not have it."""
        name = self._find(text)
        self._rules.check_push(name)

        def work(progress: Progress) -> None:
            environment = self._pull_environment(with_token=False)
            push(name, self._store, progress=progress, environment=environment, insecure=insecure)

        self.operations.begin(id, f"push {name}", work, variant=str(insecure))

    def create(self, id: str, text: str, definition: Definition, configured: bool) -> None:
        """Begins or joins the creation of the model that `text` names, as operation `id`.

        `configured`: the base is the source of a configured model, which may be a file of this
        machine and may be on any host. ModelNotFoundError if that file is not on this machine.
        """
        name = sound_name(text)
        if definition.quantize is not None:
            _check_recipe(definition.quantize)
        if configured:
            _check_file(definition.base)
        else:
            self._check_base(definition.base)
        with_token = configured or self._rules.allow_token(definition.base)

        def work(progress: Progress) -> None:
            environment = self._pull_environment(with_token)
            with _ollama_errors(definition.base, with_token):
                create(name, definition, self._store, progress=progress, environment=environment)

        variant = hashlib.sha256(repr(definition).encode(errors="surrogatepass")).hexdigest()
        self.operations.begin(id, f"create {name}", work, variant=variant)

    def copy(self, source: str, destination: str) -> None:
        """ModelNotFoundError if the store does not have `source`."""
        copy(self._find(source), sound_name(destination), self._store)

    def remove(self, model: str) -> None:
        """Removes the model. Its files that a process maps are left to `remove_unmapped`.
        ModelNotFoundError if the store does not have the model."""
        self._mapped.update(self._store.remove(self._find(model)).mapped)

    def remove_unmapped(self) -> None:
        """Removes those files of removed models that no process maps any more."""
        tried = [*self._mapped]
        if tried:
            mapped = self._store.remove_blobs(tried).mapped
            self._mapped.difference_update(set(tried).difference(mapped))

    def has_blob(self, digest: str) -> bool:
        return self._store.blob(blob_digest(digest)).is_file()

    async def sweep_periodically(self) -> None:
        """Calls `sweep` at intervals until it is cancelled."""
        while True:
            await self._retire_outdated()
            await asyncio.to_thread(self.sweep)
            await asyncio.sleep(SWEEP_EVERY_S)

    def sweep(self) -> None:
        """Removes uploads and downloads without progress, and blobs that no model uses."""
        try:
            self.uploads.drop_stale()
            self.remove_unmapped()
            freed = self._store.remove_unused()
            self.uploads.forget_used()
        except (CaravanError, OSError) as error:
            if str(error) != self._sweep_error:  # logged once, not every few minutes
                self._sweep_error = str(error)
                log.warning("store not swept", reason=self._sweep_error)
            return
        self._sweep_error = ""
        if freed:
            log.info("unused files removed", store=str(self._store.root), bytes=freed)

    async def close(self) -> None:
        self.operations.close()
        # In a thread, because the end of an upload may take long, and is waited for.
        await asyncio.to_thread(self.uploads.close)

    async def _retire_outdated(self) -> str:
        """Unloads models that the store has lost or replaced, also by another process. Returns the
        version of the list of models."""
        version = await asyncio.to_thread(self.models.version)
        if version != self._followed:
            await self.pool.retire_outdated()
            self._followed = version
        return version

    def _check_base(self, base: Source | None) -> None:
        assert not isinstance(base, PathSource), "requests cannot name files of the server"
        if base is not None and self._store.find(base.name) is None:
            self._rules.check(base)

    def _pull_environment(self, with_token: bool) -> Mapping[str, str]:
        return self._environment if with_token else without_token(self._environment)

    def _find(self, text: str) -> ModelName:
        known = self._store.find(sound_name(text))
        if known is None:
            raise ModelNotFoundError(f"model '{text}' not found")
        return known


def _contains(hosts: Sequence[str], host: str) -> bool:
    return host.lower() in {allowed.lower() for allowed in hosts}


@contextmanager
def _ollama_errors(source: Source | None, with_token: bool) -> Iterator[None]:
    """Reports a model that its source lacks in Ollama's words, which clients look for."""
    try:
        yield
    except SourceNotFoundError as error:
        remedy = ""
        if isinstance(source, HubSource) and not with_token:
            remedy = " The server uses its own token for `on_demand.hf_token_for` only."
        raise SourceError(f"pull model manifest: file does not exist: {error}{remedy}") from None


def _check_file(base: Source | None) -> None:
    if isinstance(base, PathSource) and not base.path.absolute().is_file():
        raise ModelNotFoundError(
            f"{base.path.name}: the file does not exist on {os.uname().nodename}, whose store "
            "would get the new model; the file of a configured model must exist on every node"
        )


def _check_recipe(name: str) -> None:
    try:
        recipe_named(name)
    except ConfigurationError as error:
        raise RequestError(str(error)) from None


def store_identity(store: Store) -> str:
    """An id that is equal for all processes that share the store, kept in a file of the store.

    If it cannot be read or written, the id is the machine and the path.
    """
    path = store.root / IDENTITY
    try:
        if not path.exists():
            _write_once(path, uuid.uuid4().hex)
        return path.read_text()
    except OSError:
        machine_id = Path("/etc/machine-id")
        machine = machine_id.read_text().strip() if machine_id.is_file() else os.uname().nodename
        return f"{machine}:{store.root.resolve()}"


def _write_once(path: Path, text: str) -> None:
    """Writes the file, unless another process does so first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # the name must not outlive the content
        with suppress(FileExistsError):
            os.link(temporary, path)  # atomic: the first process wins
    finally:
        temporary.unlink(missing_ok=True)
