"""OpenTelemetry spans of requests: the processes that worked on them, when, and for how long.

They are off, and OpenTelemetry is not imported, unless one of the standard variables
`OTEL_EXPORTER_OTLP_ENDPOINT` and `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set. Spans never contain
texts of users or keys.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Protocol

from runtime.errors import ConfigurationError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
DISABLED = "OTEL_SDK_DISABLED"
# The header of W3C Trace Context in requests and responses.
HEADER = "traceparent"

Attribute = str | int | float | tuple[str, ...]


class SpanKind(Enum):
    SERVER = auto()
    CLIENT = auto()


class Span(Protocol):
    @property
    def traceparent(self) -> str:
        """The id by which other spans become its children."""

    def set(self, **attributes: Attribute | None) -> None:
        """Set attributes. Two underscores in a name become a dot; None sets no attribute."""

    def fail(self, kind: str) -> None:
        """Mark the span as failed; `kind`: the type of the error."""


class Spans(Protocol):
    """Creates spans. `parent`: a `traceparent`; if it is empty or malformed, a new trace begins."""

    def span(self, name: str, kind: SpanKind, parent: str) -> AbstractContextManager[Span]:
        """A span for the duration of the context. It is marked as failed if an exception leaves
        it."""

    def past(self, name: str, parent: str, begun_ns: int, ended_ns: int) -> None:
        """A span in the past; nanoseconds since 1970."""


def configured_spans(environment: Mapping[str, str]) -> Spans | None:
    """The configured spans; None if the environment names no receiver. ConfigurationError: the
    packages of the extra `otel` are missing."""
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
