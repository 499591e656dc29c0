"""The Hugging Face Hub: what a repository holds at a revision, and where its files are had."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from model_zoo.sources.download import Location, Offer
from model_zoo.sources.http import Http, Refused, same_origin
from model_zoo.sources.hub_choice import HubFile, choose
from model_zoo.sources.reference import HubSource, is_model_path
from model_zoo.store.manifest import LAYER_TYPE, REVISION, SOURCE, Layer, Manifest
from runtime.errors import SourceError, SourceNotFoundError

ENDPOINT = "https://huggingface.co"
MAX_ANSWER_BYTES = 16 << 20
MAX_PAGES = 50
_TOKEN = re.compile(r"[\x21-\x7e]{1,1000}")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class _Revision(msgspec.Struct):
    sha: str


class _Lfs(msgspec.Struct):
    oid: str
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _Entry(msgspec.Struct):
    type: str
    path: str
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)] = 0
    lfs: _Lfs | None = None


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Where the Hub is and who asks; the token is shown to that very host only."""

    endpoint: httpx.URL
    token: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "HubAccess":
        """As the Hub's own library reads it: HF_ENDPOINT, HF_TOKEN, or the file of a login."""
        stated = environment.get("HF_ENDPOINT") or ENDPOINT
        try:
            endpoint = httpx.URL(stated.rstrip("/"))
        except httpx.InvalidURL:
            raise SourceError(f"HF_ENDPOINT is {stated[:80]!r}, which is no URL.") from None
        token = environment.get("HF_TOKEN") or _token_file(environment) or None
        if token is not None and not _TOKEN.fullmatch(token):
            raise SourceError("The Hub's token has characters that none can have; see HF_TOKEN.")
        return cls(endpoint, token)

    def authorization(self, url: httpx.URL) -> str | None:
        if self.token is None or not same_origin(url, self.endpoint):
            return None
        return f"Bearer {self.token}"

    def challenged(self, response: httpx.Response) -> bool:
        return False


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The same environment, in which HubAccess finds no token."""
    return {**environment, "HF_TOKEN": "", "HF_TOKEN_PATH": os.devnull}


def hub_offer(source: HubSource, http: Http, access: HubAccess) -> Offer:
    """The files that the source means. SourceError when there are none, or they cannot be had."""
    repository = _Repository(source, http, access)
    commit = repository.commit()
    model, projector = choose(source, repository.files(commit))
    paths: dict[str, str] = {}
    layers: list[Layer] = []
    for kind, file in [("model", file) for file in model] + [("projector", projector)]:
        if file is not None:
            layers.append(_layer(source, kind, file))
            paths.setdefault(layers[-1].digest, file.path)
    manifest = Manifest.of(layers, {SOURCE: str(source), REVISION: commit})

    def locate(layer: Layer) -> Location:
        return Location(repository.file_url(commit, paths[layer.digest]), access)

    return Offer(source.name, manifest, locate)


class _Repository:
    """Asks the Hub about one repository; what comes back is checked before it is believed."""

    def __init__(self, source: HubSource, http: Http, access: HubAccess) -> None:
        self._source = source
        self._http = http
        self._access = access
        self._name = f"{source.organisation}/{source.repository}"

    def commit(self) -> str:
        """What the revision means now, so that all files come from one state of the repository."""
        revision = quote(self._source.revision or "main", safe="")
        url = self._url(f"/api/models/{self._name}/revision/{revision}?expand=sha")
        commit = self._ask(url, _Revision)[0].sha
        if not _COMMIT.fullmatch(commit):
            raise SourceError(f"{self._source}: the Hub names no commit for it.")
        return commit

    def files(self, commit: str) -> Iterator[HubFile]:
        """Those that could be GGUF files; names that lead elsewhere are passed over."""
        url = self._url(f"/api/models/{self._name}/tree/{commit}?recursive=true")
        for _ in range(MAX_PAGES):
            entries, following = self._ask(url, list[_Entry])
            for entry in entries:
                if entry.type == "file" and is_model_path(entry.path):
                    yield _file(entry)
            if following is None:
                return
            url = following
        raise SourceError(f"{self._source}: the repository's list of files does not end.")

    def file_url(self, commit: str, path: str) -> httpx.URL:
        return self._url(f"/{self._name}/resolve/{commit}/{quote(path)}")

    def _url(self, path: str) -> httpx.URL:
        return httpx.URL(f"{self._access.endpoint}{path}")

    def _ask(self, url: httpx.URL, kind: type[T]) -> tuple[T, httpx.URL | None]:
        """The answer, and where it goes on if that was not all."""
        try:
            answer = self._http.read(url, limit_bytes=MAX_ANSWER_BYTES, credentials=self._access)
            decoded = msgspec.json.decode(answer.body, type=kind)
        except Refused as refusal:
            raise self._refused(refusal.status) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SourceError(f"{self._source}: the Hub's answer is not sound: {error}.") from None
        return decoded, self._next(answer.url, answer.headers)

    def _next(self, url: httpx.URL, headers: httpx.Headers) -> httpx.URL | None:
        stated = re.search(r'<([^<>]{1,4000})>\s*;\s*rel="?next"?', headers.get("link", ""))
        if stated is None:
            return None
        try:
            following = url.join(stated[1])
        except httpx.InvalidURL:
            following = httpx.URL()
        if not same_origin(following, url):
            raise SourceError(f"{self._source}: the repository's list goes on at another host.")
        return following

    def _refused(self, status: int) -> SourceError:
        token = "the token of HF_TOKEN" if self._access.token else "HF_TOKEN, which is not set,"
        if status in (401, 403):
            return SourceNotFoundError(
                f"{self._source}: there is no such repository, or it is private or gated and "
                f"{token} does not open it; on its page one can ask for access."
            )
        if status == 404:
            return SourceNotFoundError(
                f"{self._source}: the Hub has no such repository or revision."
            )
        return SourceError(f"{self._source}: the Hub answers with status {status}.")


def _file(entry: _Entry) -> HubFile:
    if entry.lfs is not None and _SHA256.fullmatch(entry.lfs.oid):
        return HubFile(entry.path, entry.lfs.size, entry.lfs.oid)
    return HubFile(entry.path, entry.size, None)


def _layer(source: HubSource, kind: str, file: HubFile) -> Layer:
    if file.sha256 is None:
        raise SourceError(
            f"{source}: {file.path} is not kept in LFS, so the Hub does not tell its SHA-256; "
            "download it and give its path."
        )
    # Parts of a split file are found by their names; a projector's might be the model's.
    title = PurePosixPath(file.path).name if kind == "model" else None
    return Layer(f"{LAYER_TYPE}{kind}", f"sha256:{file.sha256}", file.size, title)


def _token_file(environment: Mapping[str, str]) -> str | None:
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(2000).strip()
    except (OSError, UnicodeDecodeError):
        return None
