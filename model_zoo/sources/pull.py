"""Bringing a model from where it is published into the store."""

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from model_zoo.sources.download import Offer, Streams, download
from model_zoo.sources.http import Http
from model_zoo.sources.hub import HubAccess, hub_offer
from model_zoo.sources.reference import HubSource, RemoteSource
from model_zoo.sources.registry import registry_offer
from model_zoo.store.manifest import Layer
from model_zoo.store.store import Store, StoredModel
from runtime.errors import StoreError

# Another process may remove a blob that this one found and has not yet put to use.
GATHERINGS = 3
STREAMS = Streams()


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A step of a pull; `digest` with `total` and `completed` in bytes while a blob comes."""

    status: str
    digest: str | None = None
    total: int = 0
    completed: int = 0


Progress = Callable[[PullProgress], None]


def placeholder_digest(subject: str) -> str:
    """What progress on `subject` has for a digest until its own is known.

    Clients keep one progress bar per digest, and some show characters 7 to 19 of it.
    """
    return f"{'0' * 7}{hashlib.sha256(subject.encode(errors='surrogateescape')).hexdigest()[:12]}"


def unheard(progress: PullProgress) -> None:
    """For callers who do not ask how it goes."""


def pull(
    source: RemoteSource,
    store: Store,
    *,
    progress: Progress | None = None,
    environment: Mapping[str, str] = os.environ,
    streams: Streams = STREAMS,
    first_pause_s: float = 0.5,
) -> StoredModel:
    """The model as its source has it now; only what the store lacks is fetched.

    `progress` is called in the caller's thread. SourceError when the model cannot be had,
    StoreError when it cannot be kept; a later call goes on where this one ended.
    """
    tell = progress or unheard
    plain = frozenset(filter(None, environment.get("CARAVAN_PLAIN_HTTP_HOSTS", "").split(",")))
    with closing(Http(plain_hosts=plain, first_pause_s=first_pause_s)) as http:
        tell(PullProgress("pulling manifest"))
        offer = _offer(source, http, environment)
        offer.manifest.check_servable(source)
        model = _gathered(offer, http, store, streams, tell)
    tell(PullProgress("success"))
    return model


def _offer(source: RemoteSource, http: Http, environment: Mapping[str, str]) -> Offer:
    if isinstance(source, HubSource):
        return hub_offer(source, http, HubAccess.of(environment))
    return registry_offer(source, http)


def _gathered(
    offer: Offer, http: Http, store: Store, streams: Streams, tell: Progress
) -> StoredModel:
    for left in reversed(range(GATHERINGS)):
        store.check_room(offer.manifest.blobs)
        for layer in offer.manifest.blobs:
            _gather(layer, offer, http, store, streams, tell)
        tell(PullProgress("writing manifest"))
        try:
            return store.commit(offer.name, offer.manifest)
        except StoreError:
            if not left or not store.missing(offer.manifest):
                raise
    raise AssertionError("the last gathering returns or raises")


def _gather(
    layer: Layer, offer: Offer, http: Http, store: Store, streams: Streams, tell: Progress
) -> None:
    status = f"pulling {layer.digest.removeprefix('sha256:')[:12]}"

    def told(completed: int) -> None:
        tell(PullProgress(status, layer.digest, layer.size, completed))

    def waiting() -> None:
        tell(PullProgress("waiting for another process", layer.digest, layer.size))

    if store.holds(layer):
        told(layer.size)
        return
    with store.blob_lock(layer.digest, waiting=waiting):
        if not store.holds(layer):
            told(0)
            path = store.partial(layer.digest)
            location = offer.locate(layer)
            download(http, location, path, size=layer.size, streams=streams, told=told)
            tell(PullProgress("verifying sha256 digest", layer.digest, layer.size, layer.size))
            store.keep(layer)
    told(layer.size)
