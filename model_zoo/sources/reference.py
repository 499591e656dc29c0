"""Sources of models as text: a path, `hf://…` or `ollama://…`."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from model_zoo.store.manifest import is_file_name
from model_zoo.store.model_name import DEFAULT_TAG, HUB_HOST, ModelName
from runtime.errors import SourceError
from runtime.home_directory import expanded

_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_MAX_TEXT = 512
# What Python has in place of bytes that are not UTF-8.
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_FORM = "hf://org/repo[:quantisation], hf://org/repo/file.gguf, each with [@revision]"


@dataclass(frozen=True, slots=True)
class PathSource:
    """A GGUF file on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face Hub, or one file of it. Fields that are None mean the
    default choice."""

    organisation: str
    repository: str
    file: str | None = None
    quantization: str | None = None
    revision: str | None = None

    @property
    def name(self) -> ModelName:
        """The model's name in the store, which is unique for each source."""
        stated = self.file or self.quantization or DEFAULT_TAG
        if self.revision is None and ModelName.is_tag(stated):
            return ModelName(HUB_HOST, self.organisation, self.repository, stated)
        suffix = hashlib.sha256(f"{stated}@{self.revision}".encode()).hexdigest()[:16]
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", stated.rpartition("/")[2])[:100].lstrip("-.")
        return ModelName(HUB_HOST, self.organisation, self.repository, f"{readable}-{suffix}")

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        quantization = f":{self.quantization}" if self.quantization else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.organisation}/{self.repository}{file}{quantization}{revision}"


@dataclass(frozen=True, slots=True)
class RegistrySource:
    """A model of Ollama's registry, or of another registry with the same protocol."""

    name: ModelName

    def __str__(self) -> str:
        return f"ollama://{self.name}"


RemoteSource = HubSource | RegistrySource
Source = PathSource | RemoteSource


def parse_source(text: str) -> Source:
    """SourceError if the text is none of the three forms. ConfigurationError: see `expanded`."""
    if not text.isascii() and _SURROGATE.search(text):
        raise SourceError(f"{text[:60]!r} is not UTF-8, which paths of models must be. Rename it.")
    if len(text) > _MAX_TEXT or not text.isprintable() or not text:
        raise SourceError(f"{text[:60]!r} is not a source; use a path, hf://… or ollama://….")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return PathSource(expanded(text))
    if scheme == "hf":
        return _hub_source(rest)
    if scheme == "ollama":
        return RegistrySource(ModelName.parse(rest))
    hint = " For a page of the Hub, https://huggingface.co/org/repo, write hf://org/repo."
    raise SourceError(
        f"{scheme}:// is not known; a source is a path, hf://… or ollama://…."
        f"{hint if rest.startswith(('huggingface.co/', 'hf.co/')) else ''}"
    )


def is_path(text: str) -> bool:
    """Whether a text that a user wrote means a file: one that exists, or that is written as a path.

    Other texts without a scheme are names of models.
    """
    return is_written_as_path(text) or ("://" not in text and Path(text).is_file())


def is_written_as_path(text: str) -> bool:
    """Whether a text means a file even if there is none."""
    written_so = text.startswith((".", "/", "~")) or text.lower().endswith((".gguf", "/"))
    return written_so and "://" not in text


def is_model_path(path: str) -> bool:
    """Whether this is a safe path of a GGUF file in a repository: relative, no hidden parts."""
    return path.lower().endswith(".gguf") and all(map(is_file_name, path.split("/")))


def _hub_source(text: str) -> HubSource:
    place, at, revision = text.partition("@")
    organisation, _, rest = place.partition("/")
    repository, _, file = rest.partition("/")
    repository, colon, quantization = repository.partition(":")
    if at and not _REVISION.fullmatch(revision):
        raise SourceError(f"hf://{text}: {revision!r} is not a valid revision.")
    if not repository or (colon and file):
        raise SourceError(f"hf://{text} is not a source of the Hub; write {_FORM}.")
    if file and not is_model_path(file):
        raise SourceError(f"hf://{text}: {file!r} is not the path of a GGUF file; write {_FORM}.")
    if colon and not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", quantization):
        raise SourceError(
            f"hf://{text}: {quantization!r} is not a valid quantisation; write {_FORM}."
        )
    default = quantization.lower() in ("", DEFAULT_TAG)
    source = HubSource(
        organisation,
        repository,
        file=file or None,
        quantization=None if default else quantization.upper(),
        revision=revision or None,
    )
    _ = source.name  # raises if the organisation or repository is invalid
    return source
