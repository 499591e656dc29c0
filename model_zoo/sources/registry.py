"""Ollama's registry, and every other that speaks the same protocol: manifests and blobs."""

import re
from threading import Lock

import httpx
import msgspec

from model_zoo.sources.download import Location, Offer
from model_zoo.sources.http import Http, Refused, same_origin
from model_zoo.sources.reference import RegistrySource
from model_zoo.store.manifest import MANIFEST_TYPE, MAX_MANIFEST_BYTES, Layer, Manifest
from runtime.errors import SourceError, SourceNotFoundError

OCI_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MAX_TOKEN_BYTES = 64 << 10
MAX_CHALLENGE_CHARACTERS = 4096
_PARAMETER = re.compile(r'([A-Za-z]+)="([^"\\]*)"')
_TOKEN = re.compile(r"[\x21-\x7e]+")


class _Issued(msgspec.Struct):
    """What a token server answers; either name is in use."""

    token: str = ""
    access_token: str = ""


def registry_offer(source: RegistrySource, http: Http) -> Offer:
    """What the registry has under that name.

    SourceNotFoundError when it has nothing, SourceError when it has nothing sound.
    """
    name = source.name
    try:
        root = httpx.URL(f"{http.scheme(name.host)}://{name.host}")
    except httpx.InvalidURL:
        raise SourceError(f"{source}: {name.host} is no host.") from None
    pages = root.join(f"/v2/{name.namespace}/{name.model}/")
    token = RegistryToken(http, root)
    try:
        answer = http.read(
            pages.join(f"manifests/{name.tag}"),
            limit_bytes=MAX_MANIFEST_BYTES,
            headers={"accept": f"{MANIFEST_TYPE}, {OCI_MANIFEST_TYPE}"},
            credentials=token,
        )
    except Refused as refusal:
        raise _refused(source, refusal.status) from None
    manifest = Manifest.parse(answer.body, origin=str(source))

    def locate(layer: Layer) -> Location:
        return Location(pages.join(f"blobs/{layer.digest}"), token)

    return Offer(name, manifest, locate)


class RegistryToken:
    """The bearer token that a registry sends its anonymous visitors to fetch; shown to it alone."""

    def __init__(self, http: Http, registry: httpx.URL) -> None:
        self._http = http
        self._registry = registry
        self._token: str | None = None
        self._lock = Lock()

    def authorization(self, url: httpx.URL) -> str | None:
        if self._token is None or not same_origin(url, self._registry):
            return None
        return f"Bearer {self._token}"

    def challenged(self, response: httpx.Response) -> bool:
        """Fetch a token from where the registry says; one that has run out is replaced."""
        if not same_origin(response.url, self._registry):
            return False
        with self._lock:
            shown = response.request.headers.get("authorization")
            if shown == self.authorization(self._registry):  # else another thread has a new one
                self._token = self._fetch(_challenge(response))
        return True

    def _fetch(self, challenge: dict[str, str]) -> str:
        host = self._registry.host
        try:
            realm = httpx.URL(challenge["realm"])
        except (KeyError, httpx.InvalidURL):
            raise SourceError(
                f"{host} asks for a token and does not say where it is had."
            ) from None
        self._http.check(realm, linked_from=self._registry)
        asked = httpx.QueryParams({n: v for n, v in challenge.items() if n in ("service", "scope")})
        try:
            answer = self._http.read(realm.copy_merge_params(asked), limit_bytes=MAX_TOKEN_BYTES)
            issued = msgspec.json.decode(answer.body, type=_Issued)
        except (Refused, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceError(f"{realm.host} issues no token for {host}; is it private?") from None
        token = issued.token or issued.access_token
        if not _TOKEN.fullmatch(token):
            raise SourceError(f"{realm.host} issues no sound token for {host}.")
        return token


def _challenge(response: httpx.Response) -> dict[str, str]:
    stated = response.headers.get("www-authenticate", "")[:MAX_CHALLENGE_CHARACTERS]
    scheme, _, rest = stated.partition(" ")
    if scheme.lower() != "bearer":
        raise SourceError(
            f"{response.url.host} wants a login ({scheme[:20] or 'of no known kind'}); only models "
            "that everybody may pull can be had from registries."
        )
    return {name.lower(): value for name, value in _PARAMETER.findall(rest)}


def _refused(source: RegistrySource, status: int) -> SourceError:
    host = source.name.host
    if status == 404:
        return SourceNotFoundError(f"{source}: {host} has no such model; see what tags it has.")
    if status in (401, 403):
        return SourceNotFoundError(f"{source}: {host} has no such model, or keeps it private.")
    return SourceError(f"{source}: {host} answers with status {status}.")
