"""The definition of a new model that is created from another one or from files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model_zoo.chat.messages import Message
from model_zoo.sources.reference import Source


@dataclass(frozen=True, slots=True)
class ChosenAdapter:
    """An adapter of a new model: the digest of a blob, or the source of its file."""

    source: Source | str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Definition:
    """A new model: its base or files, and its differences from them.

    `base`: a model in the store, a model to pull, or the path of a file to import. `projector`
    replaces that of the base. `files`: digests of blobs by file name; parts of a split model keep
    their names. `template`, `system` and `messages`: None keeps those of the base, an empty value
    removes them. `parameters` override those of the base, `licenses` are added to its licences.
    `quantize`: a recipe, for weights of 16 or 32 bits. `adapters` replace those of the base; None
    keeps them.
    """

    base: Source | None = None
    projector: Source | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    messages: tuple[Message, ...] | None = None
    licenses: tuple[str, ...] = ()
    quantize: str | None = None
    adapters: tuple[ChosenAdapter, ...] | None = None
