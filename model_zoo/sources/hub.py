"""The Hugging Face Hub: the files of a repository at a revision, and their addresses.

`huggingface_hub` is not used: it reads the token from the environment of the process, which
clients' pulls must not use, bounds neither the size nor the number of answers, and follows any
redirect.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from model_zoo.sources.download import BlobLocation, RemoteModel
from model_zoo.sources.http import Http, StatusError, same_origin
from model_zoo.sources.hub_choice import HubFile, choose
from model_zoo.sources.reference import HubSource, is_model_path
from model_zoo.store.manifest import LAYER_TYPE, REVISION, SOURCE, Manifest, ManifestLayer
from runtime.errors import ConfigurationError, SourceError, SourceNotFoundError
from runtime.home_directory import expanded

ENDPOINT = "https://huggingface.co"
MAX_ANSWER_BYTES = 16 << 20
MAX_PAGES = 50
_TOKEN = re.compile(r"[\x21-\x7e]{1,1000}")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class _Revision(msgspec.Struct):
    sha: str


class _LfsPointer(msgspec.Struct):
    oid: str
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _TreeEntry(msgspec.Struct):
    type: str
    path: str
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)] = 0
    lfs: _LfsPointer | None = None


@dataclass(frozen=True, slots=True)
class HubAccess:
    """The Hub's address and a token, which is sent to that host only."""

    endpoint: httpx.URL
    token: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "HubAccess":
        """Reads HF_ENDPOINT, and HF_TOKEN or the token file of a login."""
        stated = environment.get("HF_ENDPOINT") or ENDPOINT
        try:
            endpoint = httpx.URL(stated.rstrip("/"))
        except httpx.InvalidURL:
            raise SourceError(f"HF_ENDPOINT is {stated[:80]!r}, which is not a URL.") from None
        token = environment.get("HF_TOKEN") or _token_file(environment) or None
        if token is not None and not _TOKEN.fullmatch(token):
            raise SourceError("The Hub's token contains invalid characters; check HF_TOKEN.")
        return cls(endpoint, token)

    def authorization(self, url: httpx.URL) -> str | None:
        if self.token is None or not same_origin(url, self.endpoint):
            return None
        return f"Bearer {self.token}"

    def challenged(self, response: httpx.Response) -> bool:
        return False


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without any token that HubAccess would find."""
    return {**environment, "HF_TOKEN": "", "HF_TOKEN_PATH": os.devnull}


def find_on_hub(source: HubSource, http: Http, access: HubAccess) -> RemoteModel:
    """Finds the files that the source names. SourceError if there are none or they are refused."""
    repository = _Repository(source, http, access)
    commit = repository.commit()
    model, projector = choose(source, repository.files(commit))
    paths: dict[str, str] = {}
    layers: list[ManifestLayer] = []
    for kind, file in [("model", file) for file in model] + [("projector", projector)]:
        if file is not None:
            layers.append(_layer(source, kind, file))
            paths.setdefault(layers[-1].digest, file.path)
    manifest = Manifest.of(layers, {SOURCE: str(source), REVISION: commit})

    def locate(layer: ManifestLayer) -> BlobLocation:
        return BlobLocation(repository.file_url(commit, paths[layer.digest]), access)

    return RemoteModel(source.name, manifest, locate)


class _Repository:
    """Reads one repository through the Hub's API and validates the answers."""

    def __init__(self, source: HubSource, http: Http, access: HubAccess) -> None:
        self._source = source
        self._http = http
        self._access = access
        self._name = f"{source.organisation}/{source.repository}"

    def commit(self) -> str:
        """The commit of the revision, so that all files are from one state of the repository."""
        revision = quote(self._source.revision or "main", safe="")
        url = self._url(f"/api/models/{self._name}/revision/{revision}?expand=sha")
        commit = self._read(url, _Revision)[0].sha
        if not _COMMIT.fullmatch(commit):
            raise SourceError(f"{self._source}: the Hub returns no commit for it.")
        return commit

    def files(self, commit: str) -> Iterator[HubFile]:
        """The GGUF files; unsafe paths are skipped."""
        url = self._url(f"/api/models/{self._name}/tree/{commit}?recursive=true")
        for _ in range(MAX_PAGES):
            entries, following = self._read(url, list[_TreeEntry])
            for entry in entries:
                if entry.type == "file" and is_model_path(entry.path):
                    yield _file(entry)
            if following is None:
                return
            url = following
        raise SourceError(
            f"{self._source}: the repository's list of files has more than {MAX_PAGES} pages."
        )

    def file_url(self, commit: str, path: str) -> httpx.URL:
        return self._url(f"/{self._name}/resolve/{commit}/{quote(path)}")

    def _url(self, path: str) -> httpx.URL:
        return httpx.URL(f"{self._access.endpoint}{path}")

    def _read(self, url: httpx.URL, kind: type[T]) -> tuple[T, httpx.URL | None]:
        """The decoded answer, and the URL of the next page if there is one."""
        try:
            answer = self._http.read(url, limit_bytes=MAX_ANSWER_BYTES, credentials=self._access)
            decoded = msgspec.json.decode(answer.body, type=kind)
        except StatusError as refusal:
            raise self._refused(refusal.status) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SourceError(f"{self._source}: the Hub's answer is invalid: {error}.") from None
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
            raise SourceError(f"{self._source}: the repository's list continues on another host.")
        return following

    def _refused(self, status: int) -> SourceError:
        token = "does not have access" if self._access.token else "is not set"
        if status in (401, 403):
            return SourceNotFoundError(
                f"{self._source}: the repository does not exist, or it is private or gated and "
                f"HF_TOKEN {token}; access can be requested on its page."
            )
        if status == 404:
            return SourceNotFoundError(
                f"{self._source}: the Hub has no such repository or revision."
            )
        return SourceError(f"{self._source}: the Hub answers with status {status}.")


def _file(entry: _TreeEntry) -> HubFile:
    if entry.lfs is not None and _SHA256.fullmatch(entry.lfs.oid):
        return HubFile(entry.path, entry.lfs.size, entry.lfs.oid)
    return HubFile(entry.path, entry.size, None)


def _layer(source: HubSource, kind: str, file: HubFile) -> ManifestLayer:
    if file.sha256 is None:
        raise SourceError(
            f"{source}: {file.path} is not stored in LFS, so the Hub does not know its SHA-256; "
            "download the file and use its path."
        )
    # Parts of a split file are found by their names; a projector might have the model's name.
    title = PurePosixPath(file.path).name if kind == "model" else None
    return ManifestLayer(f"{LAYER_TYPE}{kind}", f"sha256:{file.sha256}", file.size, title)


def _token_file(environment: Mapping[str, str]) -> str | None:
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    try:
        path = expanded(environment.get("HF_TOKEN_PATH") or f"{home}/token")
        with path.open(encoding="utf-8") as file:
            return file.read(2000).strip()
    except (OSError, UnicodeDecodeError, ConfigurationError):
        return None
