"""Pulls a model from where it is published into the store."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

from model_zoo.sources.download import DownloadStreams, RemoteModel, download
from model_zoo.sources.http import Http
from model_zoo.sources.hub import HubAccess, find_on_hub
from model_zoo.sources.oci_registry import find_in_registry
from model_zoo.sources.reference import HubSource, RemoteSource
from model_zoo.store.manifest import ManifestLayer
from model_zoo.store.store import Store, StoredModel
from runtime.errors import SourceError, StoreError

# Another process may remove a blob between its download and the commit of the manifest.
MAX_COMMITS = 3
STREAMS = DownloadStreams()


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A step of a pull. A step of a blob has its `digest`, and `total` and `completed` in bytes."""

    status: str
    digest: str | None = None
    total: int = 0
    completed: int = 0


Progress = Callable[[PullProgress], None]


class StepWriter:
    """Writes new and complete steps at once, and others at most every `every_s` seconds."""

    def __init__(self, write: Progress, *, every_s: float) -> None:
        self._write = write
        self._every_s = every_s
        self._last: tuple[str, str | None] | None = None
        self._due = 0.0

    def __call__(self, step: PullProgress) -> None:
        kind, now = (step.status, step.digest), time.monotonic()
        complete = bool(step.total) and step.completed == step.total
        if kind == self._last and now < self._due and not complete:
            return
        self._last, self._due = kind, now + self._every_s
        self._write(step)


def placeholder_digest(subject: str) -> str:
    """A digest that stands for `subject` in progress reports until the real one is known.

    Clients keep one progress bar per digest, and some show characters 7 to 19 of it.
    """
    return f"{'0' * 7}{hashlib.sha256(subject.encode(errors='surrogateescape')).hexdigest()[:12]}"


def ignore_progress(progress: PullProgress) -> None:
    """The `progress` of callers that show none."""


def pull(
    source: RemoteSource,
    store: Store,
    *,
    progress: Progress | None = None,
    environment: Mapping[str, str] = os.environ,
    streams: DownloadStreams = STREAMS,
    insecure: bool = False,
    first_pause_s: float = 0.5,
) -> StoredModel:
    """Brings the model up to date with its source; only missing blobs are downloaded.

    `progress` is called in the caller's thread. `insecure`: treats the registry as the
    `insecure_host` of `open_http`; the Hub, which may get a token, is never one.
    SourceError if the model is not available, StoreError if it cannot be stored; a later call
    resumes. ConfigurationError as of `Http`.
    """
    if insecure and isinstance(source, HubSource):
        raise SourceError(
            f"{source}: `insecure` is for registries only; the Hub's certificate is verified."
        )
    report = progress or ignore_progress
    host = source.name.host if insecure else None
    with (
        _named(source),
        closing(open_http(environment, host, report, first_pause_s=first_pause_s)) as http,
    ):
        report(PullProgress("pulling manifest"))
        remote = _find(source, http, environment)
        remote.manifest.check_servable(source)
        model = _download_all(remote, http, store, streams, report)
    report(PullProgress("success"))
    return model


@contextmanager
def _named(source: RemoteSource) -> Iterator[None]:
    """Names the source in SourceErrors about its host."""
    try:
        yield
    except SourceError as error:
        if str(source) in str(error):
            raise
        raise SourceError(f"{source}: {error}") from error


def open_http(
    environment: Mapping[str, str],
    insecure_host: str | None,
    report: Progress,
    *,
    first_pause_s: float,
) -> Http:
    """The connections of a pull or push. `insecure_host` may use plain HTTP or any certificate, as
    clients of Ollama request with `insecure`; the hosts in `CARAVAN_PLAIN_HTTP_HOSTS` may use plain
    HTTP."""

    def pausing(host: str) -> None:
        report(PullProgress(f"waiting for {host}"))

    plain = frozenset(filter(None, environment.get("CARAVAN_PLAIN_HTTP_HOSTS", "").split(",")))
    return Http(
        plain_hosts=plain,
        insecure_host=insecure_host,
        first_pause_s=first_pause_s,
        pausing=pausing,
        environment=environment,
    )


def _find(source: RemoteSource, http: Http, environment: Mapping[str, str]) -> RemoteModel:
    if isinstance(source, HubSource):
        return find_on_hub(source, http, HubAccess.of(environment))
    return find_in_registry(source, http)


def _download_all(
    remote: RemoteModel, http: Http, store: Store, streams: DownloadStreams, report: Progress
) -> StoredModel:
    for left in reversed(range(MAX_COMMITS)):
        store.check_space(remote.manifest.blobs)
        for layer in remote.manifest.blobs:
            _download_blob(layer, remote, http, store, streams, report)
        report(PullProgress("writing manifest"))
        try:
            return store.commit(remote.name, remote.manifest)
        except StoreError:
            if not left or not store.missing(remote.manifest):
                raise
    raise AssertionError("the last attempt returns or raises")


def _download_blob(
    layer: ManifestLayer,
    remote: RemoteModel,
    http: Http,
    store: Store,
    streams: DownloadStreams,
    report: Progress,
) -> None:
    status = f"pulling {layer.digest.removeprefix('sha256:')[:12]}"

    def completed(nbytes: int) -> None:
        report(PullProgress(status, layer.digest, layer.size, nbytes))

    def waiting() -> None:
        report(PullProgress("waiting for another process", layer.digest, layer.size))

    if store.holds(layer):
        completed(layer.size)
        return
    with store.blob_lock(layer.digest, waiting=waiting):
        if not store.holds(layer):
            completed(0)
            path, location = store.partial(layer.digest), remote.locate(layer)
            download(http, location, path, size=layer.size, streams=streams, report=completed)
            report(PullProgress("verifying sha256 digest", layer.digest, layer.size, layer.size))
            store.install_partial(layer)
    completed(layer.size)
