"""Models as registries and the Hub publish them, and handlers that answer like these servers."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from tests.loopback import Answering, Exchange, digest

OLLAMA = "application/vnd.ollama.image."
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = json.dumps({"model_format": "gguf", "model_family": "llama"}).encode()


class Registry:
    """Models by "namespace/model:tag", as a registry of Ollama's kind publishes them.

    It accepts pushes as the OCI distribution specification describes, in chunks. `uploads`: the
    sessions that are not finished.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.uploads: dict[str, bytearray] = {}

    def publish(self, name: str, layers: Sequence[tuple[str, bytes]]) -> dict:
        """`layers`: kinds, such as "model" and "params", with their contents."""
        manifest = manifest_of(layers)
        self.blobs |= {digest(data): data for data in [CONFIG, *(data for _, data in layers)]}
        self.manifests[name] = json.dumps(manifest).encode()
        return manifest

    def __call__(self, exchange: Exchange) -> None:
        if exchange.path == "/v2/":
            exchange.json({})
            return
        _, version, namespace, model, kind, reference = exchange.path.split("/", 5)
        if kind == "blobs" and reference.startswith("uploads/"):
            self._upload(exchange, reference.removeprefix("uploads/"))
            return
        if kind == "manifests" and exchange.method == "PUT":
            self._push_manifest(exchange, f"{namespace}/{model}:{reference}")
            return
        manifest = self.manifests.get(f"{namespace}/{model}:{reference}")
        if version == "v2" and kind == "manifests" and manifest is not None:
            exchange.answer(manifest, content_type=MANIFEST_TYPE)
        elif kind == "blobs" and reference in self.blobs:
            exchange.content(self.blobs[reference])
        else:
            errors = [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]
            exchange.json({"errors": errors}, status=404)

    def _upload(self, exchange: Exchange, session: str) -> None:
        if exchange.method == "POST":
            session = f"session{len(self.uploads)}-{len(self.blobs)}"
            self.uploads[session] = bytearray()
        received = self.uploads.get(session)
        if received is None:
            exchange.json({"errors": [{"code": "BLOB_UPLOAD_UNKNOWN"}]}, status=404)
            return
        if exchange.method == "PATCH":
            begin, end = map(int, exchange.headers["content-range"].split("-"))
            if begin != len(received) or int(exchange.headers["content-length"]) != end + 1 - begin:
                exchange.answer(status=416)
                return
            for piece in exchange.body():
                received += piece
        if exchange.method == "PUT":
            self._finish(exchange, session)
            return
        folder = exchange.path.partition("/uploads/")[0]
        where = {
            "location": f"{folder}/uploads/{session}?state={len(received)}",
            "range": f"0-{max(0, len(received) - 1)}",
        }
        exchange.answer(status=204 if exchange.method == "GET" else 202, **where)

    def _finish(self, exchange: Exchange, session: str) -> None:
        data, (stated,) = bytes(self.uploads.pop(session)), exchange.query["digest"]
        if digest(data) != stated:
            exchange.json({"errors": [{"code": "DIGEST_INVALID"}]}, status=400)
            return
        self.blobs[stated] = data
        exchange.answer(status=201, location=f"/v2/blobs/{stated}")

    def _push_manifest(self, exchange: Exchange, name: str) -> None:
        raw = b"".join(exchange.body())
        stated = json.loads(raw)
        references = [stated["config"], *stated["layers"]]
        if any(len(self.blobs.get(each["digest"], b"")) != each["size"] for each in references):
            exchange.json({"errors": [{"code": "MANIFEST_BLOB_UNKNOWN"}]}, status=400)
            return
        self.manifests[name] = raw
        exchange.answer(status=201)


class Hub:
    """Repositories by "org/repo": files that are kept in LFS, and had from another host."""

    def __init__(self, cdn_url: str, *, token: str | None = None, page: int = 1000) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self._cdn_url = cdn_url
        self._token = token
        self._page = page

    def __call__(self, exchange: Exchange) -> None:
        given = exchange.headers.get("authorization")
        if self._token is not None and given != f"Bearer {self._token}":
            exchange.json({"error": "Invalid username or password."}, status=401)
            return
        parts = exchange.path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        files = self.repositories.get(name)
        if files is None:
            exchange.json({"error": "Repository not found"}, status=404)
        elif api:
            self._api(exchange, name, files, parts[4], "/".join(parts[5:]))
        else:
            self._resolve(exchange, files, parts[3], "/".join(parts[4:]))

    def _api(
        self, exchange: Exchange, name: str, files: Mapping[str, bytes], verb: str, revision: str
    ) -> None:
        if revision not in (COMMIT, "main", "refs/pr/1"):
            exchange.json({"error": f"Invalid rev id: {revision}"}, status=404)
        elif verb == "revision":
            exchange.json({"_id": "6", "id": name, "sha": COMMIT})
        else:
            begin = int(exchange.query.get("cursor", ["0"])[0])
            listed = [*_tree(files)][begin : begin + self._page]
            more = begin + self._page < len([*_tree(files)])
            address = f"http://{exchange.headers['host']}{exchange.path}?recursive=true"
            link = {"link": f'<{address}&cursor={begin + self._page}>; rel="next"'} if more else {}
            exchange.json(listed, **link)

    def _resolve(
        self, exchange: Exchange, files: Mapping[str, bytes], commit: str, path: str
    ) -> None:
        if commit != COMMIT or path not in files:
            exchange.json({"error": "Entry not found"}, status=404)
            return
        sha256 = hashlib.sha256(files[path]).hexdigest()
        exchange.answer(
            status=302,
            location=f"{self._cdn_url}/{sha256}?X-Amz-Signature=secret",
            x_repo_commit=COMMIT,
            x_linked_etag=f'"{sha256}"',
            x_linked_size=str(len(files[path])),
        )

    def cdn(self) -> Answering:
        """The host that has the files, by digest."""

        def answering(exchange: Exchange) -> None:
            for files in self.repositories.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == exchange.path.strip("/"):
                        exchange.content(data)
                        return
            exchange.answer(status=403)

        return answering


def manifest_of(layers: Sequence[tuple[str, bytes]]) -> dict:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest(CONFIG), "size": len(CONFIG)},
        "layers": [
            {"mediaType": OLLAMA + kind, "digest": digest(data), "size": len(data)}
            for kind, data in layers
        ],
    }


def _tree(files: Mapping[str, bytes]) -> list[dict]:
    folders = sorted({path.rpartition("/")[0] for path in files} - {""})
    return [
        {"type": "directory", "oid": "a" * 40, "size": 0, "path": folder} for folder in folders
    ] + [_entry(path, data) for path, data in files.items()]


def _entry(path: str, data: bytes) -> dict:
    entry = {"type": "file", "oid": "b" * 40, "size": len(data), "path": path}
    if not path.endswith((".gguf", ".safetensors")):
        return entry
    sha256 = hashlib.sha256(data).hexdigest()
    return entry | {"lfs": {"oid": sha256, "size": len(data), "pointerSize": 134}}
