"""Facts about a model from its files and its manifest, whether or not it can be served."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_zoo.chat.template_choice import choose_template
from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.gguf.header_only_file import HeaderOnlyFile
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import class_for
from model_zoo.sources.reference import PathSource, is_path, parse_source
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store, StoredModel
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import CaravanError, ModelFileError
from runtime.quant.block_types import BlockType


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """The files of a model; `stored`: None for a file outside the store. `draft`: that of a draft
    model."""

    file: Path
    projector: Path | None
    stored: StoredModel | None
    draft: Path | None = None

    @property
    def adapters(self) -> tuple[AdapterPath, ...]:
        return () if self.stored is None else self.stored.adapters


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """The chat template and its origin; `problem`: why it cannot be used."""

    source: str | None
    origin: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class TypeTotal:
    """All tensors of one type in a file."""

    type: BlockType
    tensors: int
    elements: int
    nbytes: int


class ModelFacts:
    """Facts of one GGUF file. ModelFileError for other files and for one without architecture."""

    def __init__(self, path: Path) -> None:
        self.file = HeaderOnlyFile.open(path)
        self.metadata = Metadata(self.file.metadata, path=self.file.path)
        self.architecture = self.metadata.architecture
        self.quantization = self.file.quantization(self.metadata)
        self.template = _template(self.file, self.architecture)
        self.unserved = self._no_class() or self.template.problem

    @property
    def name(self) -> str:
        return _text(self.file.metadata.get("general.name")) or self.file.stem

    @property
    def parameter_count(self) -> int:
        return sum(info.elements for info in self.file.tensors.values())

    def size(self, key: str) -> int | None:
        """A number of the architecture such as `context_length`; None if absent."""
        value = self.file.metadata.get(self.metadata.full_key(key))
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def vocab_size(self) -> int | None:
        return self.metadata.length("tokenizer.ggml.tokens")

    @property
    def license(self) -> str | None:
        return _text(self.file.metadata.get("general.license"))

    def totals(self) -> list[TypeTotal]:
        """Totals by type, the largest first."""
        by_type: dict[BlockType, list[Any]] = {}
        for info in self.file.tensors.values():
            by_type.setdefault(info.type, []).append(info)
        totals = (
            TypeTotal(
                kind,
                len(infos),
                sum(info.elements for info in infos),
                sum(info.nbytes for info in infos),
            )
            for kind, infos in by_type.items()
        )
        return sorted(totals, key=lambda total: total.nbytes, reverse=True)

    def _no_class(self) -> str | None:
        try:
            class_for(self.metadata)
        except ModelFileError as error:
            return str(error)
        return None


def locate(text: str, store: Store) -> LocatedModel:
    """Resolves a path, a name or a source; a path is a text that exists or looks like one.

    StoreError if the store does not have the model. A path is not checked.
    """
    source = parse_source(text)
    if not isinstance(source, PathSource):
        return _stored(store, source.name)
    if is_path(text):
        return LocatedModel(source.path, None, None)
    return _stored(store, ModelName.parse(text))


def _stored(store: Store, name: ModelName) -> LocatedModel:
    model = store.open(name)
    return LocatedModel(model.files[0], next(iter(model.projectors), None), model)


def _template(file: GGUFFile, architecture: str) -> TemplateFacts:
    try:
        tokenizer = load_tokenizer(file.metadata, architecture=architecture)
        chosen = choose_template(file.metadata, tokenizer, architecture=architecture)
    except CaravanError as error:
        source = _text(file.metadata.get("tokenizer.chat_template"))
        return TemplateFacts(source, None if source is None else "file", str(error))
    return (
        TemplateFacts(None, None)
        if chosen is None
        else TemplateFacts(chosen.template.source, chosen.origin)
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def texts_of(stored: StoredModel, store: Store, kind: str) -> list[str]:
    """The texts of the layers of one kind, such as "license" or "system"."""
    return [store.text(layer) for layer in stored.manifest.of_kind(kind)]


def tensor_list(file: GGUFFile) -> list[Mapping[str, Any]]:
    """Each tensor for JSON; shapes as in GGUF, the fastest dimension first."""
    return [
        {
            "name": info.name,
            "type": info.type.name,
            "shape": info.shape[::-1],
            "bytes": info.nbytes,
        }
        for info in file.tensors.values()
    ]
