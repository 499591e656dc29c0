"""What lists of models say: of those that can be served, and of those that are loaded."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from serve_app.config.options import Options
from serve_app.gateway.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that can be served. `digest` hex SHA-256, `modified_at` unix seconds.

    `options`: those that it brings. `architecture` and what follows are of its file's header.
    """

    name: str
    digest: str
    file_bytes: int
    modified_at: float
    architecture: str = ""
    quantization: str = ""
    parameter_count: int = 0
    context_length: int = 0
    embedding_length: int = 0
    capabilities: tuple[str, ...] = ("completion",)
    options: Options = field(default_factory=Options)

    @classmethod
    def of(cls, card: ModelCard) -> "ListedModel":
        names = ("name", "digest", "file_bytes", "modified_at", "architecture", "quantization")
        more = ("parameter_count", "context_length", "embedding_length", "capabilities", "options")
        return cls(**{name: getattr(card, name) for name in (*names, *more)})


def unknown(name: str) -> ListedModel:
    """A model that can be asked for, and has to be pulled first.

    Its digest is not known; Ollama's command line needs one of at least twelve characters.
    """
    return ListedModel(name, digest="0" * 64, file_bytes=0, modified_at=0.0)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: what it takes there, in bytes, and the part of that on accelerators.

    `expires_at`: unix seconds, None for never. `replicas` have it, of which each has a whole one.
    """

    model: ListedModel
    reserved_bytes: int
    device_bytes: int
    context_tokens: int
    expires_at: float | None = None
    replicas: int = 1

    @classmethod
    def of(cls, card: ModelCard) -> "LoadedModel":
        """A model that stays."""
        return cls(
            ListedModel.of(card), card.reserved_bytes, card.device_bytes, card.context_tokens
        )


def together(loaded: Iterable[LoadedModel]) -> list[LoadedModel]:
    """Each model once, with what all its replicas take; what stays longest first."""
    found: dict[tuple[str, str], LoadedModel] = {}
    for each in loaded:
        key = (each.model.name, each.model.digest)
        found[key] = each if key not in found else _joined(found[key], each)
    return sorted(found.values(), key=_stays, reverse=True)


def _joined(one: LoadedModel, other: LoadedModel) -> LoadedModel:
    return replace(
        max(one, other, key=_stays),
        reserved_bytes=one.reserved_bytes + other.reserved_bytes,
        device_bytes=one.device_bytes + other.device_bytes,
        replicas=one.replicas + other.replicas,
    )


def _stays(loaded: LoadedModel) -> float:
    return float("inf") if loaded.expires_at is None else loaded.expires_at
