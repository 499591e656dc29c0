"""Entries of the lists of models: those that can be served and those that are loaded."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from serve_app.config.options import Options
from serve_app.messages.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that can be served. `digest`: hex SHA-256. `modified_at`: unix seconds.

    `options`: the model's own. `architecture` and the fields after it come from the file's header,
    `context_tokens` from a replica that has loaded it: the limit of a sequence, 0 if not known.
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
    context_tokens: int = 0

    @classmethod
    def of(cls, card: ModelCard) -> "ListedModel":
        return cls(**{each.name: getattr(card, each.name) for each in fields(cls)})


def unpulled_model(name: str) -> ListedModel:
    """A configured model whose files have not been pulled yet.

    Its digest is unknown; Ollama's command line fails on digests of fewer than twelve characters.
    """
    return ListedModel(name, digest="0" * 64, file_bytes=0, modified_at=0.0)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: its total bytes, and the part of them on accelerators.

    `expires_at`: unix seconds, None if it is never unloaded. `replicas`: number of replicas, each
    with a copy of the model.
    """

    model: ListedModel
    reserved_bytes: int
    device_bytes: int
    expires_at: float | None = None
    replicas: int = 1

    @classmethod
    def of(cls, card: ModelCard) -> "LoadedModel":
        """A model that is never unloaded."""
        return cls(ListedModel.of(card), card.reserved_bytes, card.device_bytes)


def merge_loaded(loaded: Iterable[LoadedModel]) -> list[LoadedModel]:
    """One entry per model with the sums of its replicas, in descending order of expiry."""
    merged: dict[tuple[str, str], LoadedModel] = {}
    for each in loaded:
        key = (each.model.name, each.model.digest)
        merged[key] = each if key not in merged else _merged(merged[key], each)
    return sorted(merged.values(), key=_expiry, reverse=True)


def _merged(one: LoadedModel, other: LoadedModel) -> LoadedModel:
    return replace(
        max(one, other, key=_expiry),
        reserved_bytes=one.reserved_bytes + other.reserved_bytes,
        device_bytes=one.device_bytes + other.device_bytes,
        replicas=one.replicas + other.replicas,
    )


def _expiry(loaded: LoadedModel) -> float:
    return float("inf") if loaded.expires_at is None else loaded.expires_at
