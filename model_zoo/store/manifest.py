"""Manifests: which blobs make a model, in the form that registries and Ollama's store use."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import msgspec

from runtime.errors import SourceError

MAX_MANIFEST_BYTES = 4 << 20
MAX_LAYERS = 1000
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
LAYER_TYPE = "application/vnd.ollama.image."
TITLE = "org.opencontainers.image.title"
SOURCE = "org.opencontainers.image.source"
REVISION = "org.opencontainers.image.revision"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# A flat file name: no separator, no leading dot, nothing that a URL would take amiss.
_TITLE = re.compile(r"[^./\\?#%][^/\\?#%]*")
MAX_TITLE_BYTES = 200

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _Layer(msgspec.Struct):
    mediaType: str
    digest: str
    size: _Size
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct):
    layers: list[_Layer]
    config: _Layer | None = None
    annotations: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob of a model: `digest` "sha256:<hex>"; `title` the name of the file it was."""

    media_type: str
    digest: str
    size: int
    title: str | None = None

    @property
    def kind(self) -> str:
        """Such as "model", "projector", "template", "params"."""
        return self.media_type.removeprefix(LAYER_TYPE)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says; `raw`: its own bytes."""

    layers: tuple[Layer, ...]
    config: Layer | None
    annotations: Mapping[str, str]
    raw: bytes

    @classmethod
    def parse(cls, raw: bytes, *, origin: str) -> "Manifest":
        """SourceError, which names `origin`, unless every digest, size and title is sound."""
        try:
            if len(raw) > MAX_MANIFEST_BYTES:
                raise SourceError(f"it has {len(raw):,} bytes, more than {MAX_MANIFEST_BYTES:,}")
            stated = msgspec.json.decode(raw, type=_Manifest)
            if not 0 < len(stated.layers) <= MAX_LAYERS:
                raise SourceError(f"it has {len(stated.layers):,} layers")
            layers = tuple(_layer(layer) for layer in stated.layers)
            titles = [layer.title for layer in layers if layer.title is not None]
            if len(set(titles)) != len(titles):
                raise SourceError("two of its files have the same name")
            config = None if stated.config is None else _layer(stated.config)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, SourceError) as error:
            raise SourceError(f"{origin}: no sound manifest: {error}.") from None
        return cls(layers, config, MappingProxyType(stated.annotations or {}), raw)

    @classmethod
    def of(
        cls,
        layers: Iterable[Layer],
        annotations: Mapping[str, str],
        *,
        config: Layer | None = None,
    ) -> "Manifest":
        """A manifest of our own, for sources that have none."""
        stated = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            **({} if config is None else {"config": _stated(config)}),
            "layers": [_stated(layer) for layer in layers],
            "annotations": dict(annotations),
        }
        return cls.parse(msgspec.json.encode(stated), origin="this manifest")

    @property
    def blobs(self) -> tuple[Layer, ...]:
        """Every blob once."""
        stated = self.layers if self.config is None else (*self.layers, self.config)
        return tuple({layer.digest: layer for layer in stated}.values())

    @property
    def digest(self) -> str:
        """SHA-256 of its own bytes, in hex: what tells one state of a model from another."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(layer.size for layer in self.blobs)

    def of_kind(self, kind: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind == kind)

    def check_servable(self, name: object) -> None:
        """SourceError when no server here could answer with it, so that nothing is fetched."""
        if self.of_kind("adapter"):
            raise SourceError(
                f"{name}: has a LoRA adapter beside its model, which is not served; "
                "take a model that has the adapter merged in."
            )
        if not self.of_kind("model"):
            kinds = ", ".join(sorted({layer.kind for layer in self.layers}))[:200]
            raise SourceError(f"{name}: has no model in GGUF, only {kinds}; it cannot be served.")


def check_digest(digest: str) -> str:
    """The digest itself, or SourceError."""
    if not _DIGEST.fullmatch(digest):
        raise SourceError(f"{digest[:80]!r} is not a digest, sha256: and 64 hexadecimal digits")
    return digest


def is_file_name(title: str) -> bool:
    """Whether a file may have this name in a folder of ours, and a terminal show it."""
    if not title.isprintable() or not _TITLE.fullmatch(title):
        return False
    return len(title.encode()) <= MAX_TITLE_BYTES


def _layer(stated: _Layer) -> Layer:
    title = (stated.annotations or {}).get(TITLE)
    if title is not None and not is_file_name(title):
        raise SourceError(f"{title[:80]!r} cannot be the name of a file")
    return Layer(stated.mediaType, check_digest(stated.digest), stated.size, title)


def _stated(layer: Layer) -> dict[str, object]:
    stated = {"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size}
    return stated if layer.title is None else {**stated, "annotations": {TITLE: layer.title}}
