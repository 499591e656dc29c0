"""Ollama's registry, and others with the same protocol: manifests and blobs."""

import re
from dataclasses import dataclass
from threading import Lock

import httpx
import msgspec

from model_zoo.sources.download import BlobLocation, RemoteModel
from model_zoo.sources.http import Http, StatusError, same_origin
from model_zoo.sources.reference import RegistrySource
from model_zoo.store.manifest import MANIFEST_TYPE, MAX_MANIFEST_BYTES, Manifest, ManifestLayer
from model_zoo.store.model_name import DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG, ModelName
from runtime.errors import SourceError, SourceNotFoundError

MANIFEST_TYPES = (MANIFEST_TYPE, "application/vnd.oci.image.manifest.v1+json")
MAX_TOKEN_BYTES = 64 << 10
MAX_CHALLENGE_CHARACTERS = 4096
_PARAMETER = re.compile(r'([A-Za-z]+)="([^"\\]*)"')
_TOKEN = re.compile(r"[\x21-\x7e]+")


class _Issued(msgspec.Struct):
    """The answer of a token server; servers use either name for the token."""

    token: str = ""
    access_token: str = ""


def find_in_registry(source: RegistrySource, http: Http) -> RemoteModel:
    """Finds a model by name.

    SourceNotFoundError if the registry does not have it, SourceError for an invalid manifest.
    """
    repository = Repository.of(source.name, http)
    try:
        answer = http.read(
            repository.manifest,
            limit_bytes=MAX_MANIFEST_BYTES,
            headers={"accept": ", ".join(MANIFEST_TYPES)},
            credentials=repository.token,
        )
    except StatusError as refusal:
        raise _refused(source, refusal.status) from None
    manifest = Manifest.parse(answer.body, origin=str(source))

    def locate(layer: ManifestLayer) -> BlobLocation:
        return BlobLocation(repository.blob(layer.digest), repository.token)

    return RemoteModel(source.name, manifest, locate)


@dataclass(frozen=True, slots=True, eq=False)
class Repository:
    """The addresses of a model's blobs and manifest in a registry; `token` authorizes requests."""

    pages: httpx.URL
    tag: str
    token: "RegistryToken"

    @classmethod
    def of(cls, name: ModelName, http: Http) -> "Repository":
        try:
            root = httpx.URL(f"{http.scheme(name.host)}://{name.host}")
        except httpx.InvalidURL:
            raise SourceError(f"{name}: {name.host} is not a valid host.") from None
        pages = root.join(f"/v2/{name.namespace}/{name.model}/")
        return cls(pages, name.tag, RegistryToken(http, root))

    @property
    def manifest(self) -> httpx.URL:
        return self.pages.join(f"manifests/{self.tag}")

    @property
    def uploads(self) -> httpx.URL:
        return self.pages.join("blobs/uploads/")

    def blob(self, digest: str) -> httpx.URL:
        return self.pages.join(f"blobs/{digest}")


class RegistryToken:
    """The anonymous bearer token that a registry requires; it is sent to that registry only."""

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
        """Fetches a token from the server that the registry names; replaces an expired one. False
        if it names none, as the Hub does for a repository that is private or does not exist."""
        if not same_origin(response.url, self._registry):
            return False
        challenge = _challenge(response)
        realm = _token_server(challenge)
        if realm is None:
            return False
        with self._lock:
            sent = response.request.headers.get("authorization")
            if sent == self.authorization(self._registry):  # else another thread has a new one
                self._token = self._fetch(realm, challenge)
        return True

    def _fetch(self, realm: httpx.URL, challenge: dict[str, str]) -> str:
        host = self._registry.host
        self._http.check(realm, linked_from=self._registry)
        query = httpx.QueryParams({n: v for n, v in challenge.items() if n in ("service", "scope")})
        try:
            answer = self._http.read(realm.copy_merge_params(query), limit_bytes=MAX_TOKEN_BYTES)
            issued = msgspec.json.decode(answer.body, type=_Issued)
        except (StatusError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise SourceError(
                f"{realm.host} issues no token for {host}; the model may be private."
            ) from None
        token = issued.token or issued.access_token
        if not _TOKEN.fullmatch(token):
            raise SourceError(f"{realm.host} issues an invalid token for {host}.")
        return token


def _challenge(response: httpx.Response) -> dict[str, str]:
    stated = response.headers.get("www-authenticate", "")[:MAX_CHALLENGE_CHARACTERS]
    scheme, _, rest = stated.partition(" ")
    if scheme.lower() != "bearer":
        raise SourceError(
            f"{response.url.host} requires a login ({scheme[:20] or 'of unknown kind'}); "
            "registries are used without one."
        )
    return {name.lower(): value for name, value in _PARAMETER.findall(rest)}


def _token_server(challenge: dict[str, str]) -> httpx.URL | None:
    """None if the challenge's realm is no address but a text."""
    try:
        realm = httpx.URL(challenge.get("realm", ""))
    except httpx.InvalidURL:
        return None
    return realm if realm.scheme else None


def _refused(source: RegistrySource, status: int) -> SourceError:
    host = source.name.host
    if status == 404:
        return SourceNotFoundError(
            f"{source}: {host} has no such model; check its name and tag.{_hub_hint(source.name)}"
        )
    if status in (401, 403):
        return SourceNotFoundError(
            f"{source}: {host} has no such model, or it is private.{_hub_hint(source.name)}"
        )
    return SourceError(f"{source}: {host} answers with status {status}.")


def _hub_hint(name: ModelName) -> str:
    """For names that are written like repositories of the Hub."""
    if name.host != DEFAULT_HOST or name.namespace == DEFAULT_NAMESPACE:
        return ""
    tag = "" if name.tag == DEFAULT_TAG else f":{name.tag}"
    repository = f"hf://{name.namespace}/{name.model}{tag}"
    return f" For a repository of the Hugging Face Hub, write {repository}."
