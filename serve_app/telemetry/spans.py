"""OpenTelemetry spans of requests: who worked on them, when, and for how long.

They are off, and OpenTelemetry is not imported, unless one of the standard variables
`OTEL_EXPORTER_OTLP_ENDPOINT` and `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set. No span has a text of
a user or a key.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Protocol

from runtime.errors import ConfigurationError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
DISABLED = "OTEL_SDK_DISABLED"
# W3C Trace Context: of requests and of responses.
HEADER = "traceparent"

Attribute = str | int | float | tuple[str, ...]


class SpanKind(Enum):
    SERVER = auto()
    CLIENT = auto()
    INTERNAL = auto()


class Span(Protocol):
    @property
    def traceparent(self) -> str:
        """By which other spans become its children."""

    def set(self, **attributes: Attribute | None) -> None:
        """By name, with two underscores for a point; None for no attribute."""

    def fail(self, kind: str) -> None:
        """What the span is about has failed; `kind`: the type of the error."""


class Spans(Protocol):
    """`parent`: a `traceparent`, empty or malformed for the first span of a trace."""

    def span(self, name: str, kind: SpanKind, parent: str) -> AbstractContextManager[Span]:
        """A span for the duration of the context. It fails if an exception leaves it."""

    def past(self, name: str, parent: str, begun_ns: int, ended_ns: int) -> None:
        """A span in the past; nanoseconds since 1970."""


def configured_spans(environment: Mapping[str, str]) -> Spans | None:
    """None if the environment names no receiver of spans. ConfigurationError: the packages of the
    extra `otel` are missing."""
    named = any(environment.get(name) for name in ENDPOINTS)
    if not named or environment.get(DISABLED, "").lower() == "true":
        return None
    try:
        from serve_app.telemetry.otel_spans import OtelSpans, exporting_provider
    except ImportError as error:
        raise ConfigurationError(
            f"{' or '.join(ENDPOINTS)} is set, but {error.name} is not installed; install "
            "caravan[otel] or unset the variable."
        ) from None
    return OtelSpans(exporting_provider())
