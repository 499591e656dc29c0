"""Resolves a source of the configuration to files on this machine and the model's other layers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from model_zoo.chat.messages import Message
from model_zoo.chat.template_language import is_go_template
from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.sources.pull import Progress, pull
from model_zoo.sources.reference import PathSource, RemoteSource, parse_source
from model_zoo.store.store import Store, StoredModel
from runtime.errors import SourceError, StoreError

T = TypeVar("T")


class _Turn(msgspec.Struct):
    role: str
    content: str = ""


class _Config(msgspec.Struct):
    renderer: str | None = None


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model's files, and the content of its other layers.

    `path`: the GGUF file, or the first part of a split one. `stored`: the model in the store, None
    if the source is a path. `template`: a Jinja or Go template; `renderer`: the name of the part of
    Ollama that writes prompts instead. `parameters`: options as in requests. `messages` begin every
    conversation.
    """

    path: Path
    projector: Path | None = None
    stored: StoredModel | None = field(default=None, compare=False)
    template: str | None = None
    renderer: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: tuple[Message, ...] = ()
    license: str | None = None
    adapters: tuple[AdapterPath, ...] = ()

    @property
    def served_template(self) -> str | None:
        """The template. None for a Go template of a model with a renderer, since Ollama does not
        use it either."""
        replaced = self.renderer and self.template and is_go_template(self.template)
        return None if replaced else self.template


def resolve(
    text: str,
    store: Store,
    *,
    progress: Progress | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ResolvedModel:
    """Resolves the source; pulls the model if the store lacks it or a part of it."""
    source = parse_source(text)
    if isinstance(source, PathSource):
        return ResolvedModel(source.path)
    stored = stored_model(source, store)
    if stored is None:
        stored = pull(source, store, progress=progress, environment=environment)
    return resolve_stored(stored, store)


def stored_model(source: RemoteSource, store: Store) -> StoredModel | None:
    """The model, None if the store lacks it or a part of it."""
    try:
        return store.open(source.name)
    except (StoreError, SourceError):
        return None


def resolve_stored(stored: StoredModel, store: Store) -> ResolvedModel:
    """The model with its layers. StoreError if a JSON layer is invalid, SourceError if its texts
    are too long."""
    stored.manifest.check_texts(stored.name)
    layers = _LayerReader(stored, store)
    turns = layers.json("messages", list[_Turn]) or []
    return ResolvedModel(
        path=stored.files[0],
        projector=stored.projectors[0] if stored.projectors else None,
        stored=stored,
        template=layers.last("template") or layers.last("prompt"),
        renderer=layers.renderer(),
        parameters=layers.json("params", dict[str, Any]) or {},
        system=layers.last("system"),
        messages=tuple(Message(role=turn.role, content=turn.content) for turn in turns),
        license=layers.joined("license"),
        adapters=stored.adapters,
    )


class _LayerReader:
    def __init__(self, stored: StoredModel, store: Store) -> None:
        self._stored = stored
        self._store = store

    def joined(self, kind: str) -> str | None:
        """The different texts of that kind, each on new lines; None if they are empty or there is
        none."""
        layers = {layer.digest: layer for layer in self._stored.manifest.of_kind(kind)}
        return "\n".join(map(self._store.text, layers.values())) or None

    def last(self, kind: str) -> str | None:
        """The text of the last layer of that kind; None if it is empty or there is none."""
        layers = self._stored.manifest.of_kind(kind)
        return self._store.text(layers[-1]) or None if layers else None

    def renderer(self) -> str | None:
        """The renderer that the config names; None for configs that are not Ollama's."""
        config = self._stored.manifest.config
        if config is None:
            return None
        try:
            return msgspec.json.decode(self._store.text(config).encode(), type=_Config).renderer
        except (StoreError, msgspec.DecodeError, RecursionError):
            return None

    def json(self, kind: str, type: type[T]) -> T | None:
        text = self.last(kind)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text.encode(), type=type)
        except (msgspec.DecodeError, RecursionError) as error:
            raise StoreError(
                f"{self._stored.name}: its layer {kind} is invalid: {error}."
            ) from None
