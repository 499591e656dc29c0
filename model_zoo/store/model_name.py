"""Names of models in registries and stores: host, namespace, model and tag."""

import re
from dataclasses import dataclass

from runtime.errors import SourceError

DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG = "registry.ollama.ai", "library", "latest"
HUB_HOST = "huggingface.co"

# Neither matches ".." or a separator, so each part is safe as a file name.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(:[0-9]{1,5})?")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class ModelName:
    """A complete name; SourceError if a part is invalid."""

    host: str
    namespace: str
    model: str
    tag: str

    def __post_init__(self) -> None:
        for part, pattern in zip(self.parts, (_HOST, _PART, _PART, _PART), strict=True):
            if not pattern.fullmatch(part):
                raise SourceError(
                    f"{_quoted(part)} cannot be part of a model's name; use at most 128 letters, "
                    "digits, `_`, `-` and `.`, and begin with a letter, a digit or `_`."
                )

    @classmethod
    def parse(cls, text: str) -> "ModelName":
        """Parses `[host/][namespace/]model[:tag]`; SourceError if it is invalid."""
        *before, last = text.split("/")
        if len(before) > 2:
            raise SourceError(
                f"{_quoted(text)} is not a model's name; it is [host/][namespace/]name[:tag]."
            )
        model, colon, tag = last.partition(":")
        host, namespace = [DEFAULT_HOST, DEFAULT_NAMESPACE][: 2 - len(before)] + before
        return cls(host, namespace, model, tag if colon else DEFAULT_TAG)

    @staticmethod
    def is_tag(text: str) -> bool:
        return _PART.fullmatch(text) is not None

    @property
    def parts(self) -> tuple[str, str, str, str]:
        return (self.host, self.namespace, self.model, self.tag)

    def __str__(self) -> str:
        """The shortest form of the name, always with the tag."""
        shown = f"{self.model}:{self.tag}"
        if self.host != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{shown}"
        return shown if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{shown}"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
