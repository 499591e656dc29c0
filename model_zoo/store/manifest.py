"""Manifests: the blobs of a model, in the format of registries and of Ollama's store."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import msgspec

from runtime.errors import SourceError

MAX_MANIFEST_BYTES = 4 << 20
MAX_LAYERS = 1000
# Layers that are read whole when a model is listed, shown or loaded.
TEXT_KINDS = frozenset({"license", "messages", "params", "prompt", "system", "template"})
MAX_TEXT_BYTES = 16 << 20
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
LAYER_TYPE = "application/vnd.ollama.image."
TITLE = "org.opencontainers.image.title"
SOURCE = "org.opencontainers.image.source"
REVISION = "org.opencontainers.image.revision"
ADAPTER_SCALE = "caravan.adapter.scale"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# A flat file name: no separator, no leading dot, no character with a meaning in URLs.
_TITLE = re.compile(r"[^./\\?#%][^/\\?#%]*")
MAX_TITLE_BYTES = 200

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _StatedLayer(msgspec.Struct):
    mediaType: str
    digest: str
    size: _Size
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct):
    layers: list[_StatedLayer]
    config: _StatedLayer | None = None
    mediaType: str = MANIFEST_TYPE
    annotations: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ManifestLayer:
    """One blob of a model. `digest`: "sha256:<hex>"; `size`: bytes; `title`: the file's name;
    `scale`: the factor of an adapter's changes."""

    media_type: str
    digest: str
    size: int
    title: str | None = None
    scale: float = 1.0

    @property
    def kind(self) -> str:
        """The kind of content: "model", "projector", "template", "params" and so on."""
        return self.media_type.removeprefix(LAYER_TYPE)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A parsed manifest; `raw`: its bytes."""

    layers: tuple[ManifestLayer, ...]
    config: ManifestLayer | None
    annotations: Mapping[str, str]
    raw: bytes
    media_type: str = MANIFEST_TYPE

    @classmethod
    def parse(cls, raw: bytes, *, origin: str) -> "Manifest":
        """Raises SourceError, which names `origin`, for an invalid digest, size or title, and for
        sizes of one blob that differ."""
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
            _check_sizes(layers if config is None else (*layers, config))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, SourceError) as error:
            raise SourceError(f"{origin}: invalid manifest: {error}.") from None
        annotations = MappingProxyType(stated.annotations or {})
        return cls(layers, config, annotations, raw, stated.mediaType)

    @classmethod
    def of(
        cls,
        layers: Iterable[ManifestLayer],
        annotations: Mapping[str, str],
        *,
        config: ManifestLayer | None = None,
    ) -> "Manifest":
        """Builds the manifest of a model whose source has none."""
        stated = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            **({} if config is None else {"config": _stated(config)}),
            "layers": [_stated(layer) for layer in layers],
            "annotations": dict(annotations),
        }
        return cls.parse(msgspec.json.encode(stated), origin="the new manifest")

    @property
    def blobs(self) -> tuple[ManifestLayer, ...]:
        """Each blob once, even if several layers have it."""
        stated = self.layers if self.config is None else (*self.layers, self.config)
        return tuple({layer.digest: layer for layer in stated}.values())

    @property
    def digest(self) -> str:
        """SHA-256 of its bytes, in hex; it identifies the version of the model."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(layer.size for layer in self.blobs)

    def of_kind(self, kind: str) -> tuple[ManifestLayer, ...]:
        return tuple(layer for layer in self.layers if layer.kind == kind)

    def check_texts(self, name: object) -> None:
        """SourceError if the model's texts together have more bytes than `MAX_TEXT_BYTES`."""
        texts = {layer.digest: layer.size for layer in self.layers if layer.kind in TEXT_KINDS}
        if sum(texts.values()) > MAX_TEXT_BYTES:
            raise SourceError(
                f"{name}: its texts, such as templates and licences, have "
                f"{sum(texts.values()):,} bytes; the limit is {MAX_TEXT_BYTES:,}."
            )

    def check_servable(self, name: object) -> None:
        """SourceError if the model cannot be served; checked before blobs are downloaded."""
        self.check_texts(name)
        if not self.of_kind("model"):
            kinds = ", ".join(sorted({layer.kind for layer in self.layers}))[:200]
            raise SourceError(f"{name}: has no GGUF model, only {kinds}; it cannot be served.")


def check_digest(digest: str) -> str:
    """`digest` if it is valid; SourceError otherwise."""
    if not _DIGEST.fullmatch(digest):
        raise SourceError(f"{digest[:80]!r} is not a digest, sha256: and 64 hexadecimal digits")
    return digest


def is_file_name(title: str) -> bool:
    """Whether the text is safe as a file name and on a terminal."""
    if not title.isprintable() or not _TITLE.fullmatch(title):
        return False
    return len(title.encode()) <= MAX_TITLE_BYTES


def _layer(stated: _StatedLayer) -> ManifestLayer:
    title = (stated.annotations or {}).get(TITLE)
    if title is not None and not is_file_name(title):
        raise SourceError(f"{title[:80]!r} is not a valid file name")
    scale = _scale((stated.annotations or {}).get(ADAPTER_SCALE, "1"))
    return ManifestLayer(stated.mediaType, check_digest(stated.digest), stated.size, title, scale)


def _check_sizes(layers: Iterable[ManifestLayer]) -> None:
    """Otherwise a text could state few bytes of a blob whose true size another layer states."""
    sizes: dict[str, int] = {}
    for layer in layers:
        if sizes.setdefault(layer.digest, layer.size) != layer.size:
            raise SourceError(f"it states two sizes of {layer.digest}")


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise SourceError(f"{text[:80]!r} is not a finite number ({ADAPTER_SCALE})")
    return scale


def _stated(layer: ManifestLayer) -> dict[str, object]:
    stated = {"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size}
    annotations = {} if layer.title is None else {TITLE: layer.title}
    if layer.scale != 1.0:
        annotations[ADAPTER_SCALE] = repr(layer.scale)
    return {**stated, "annotations": annotations} if annotations else stated
