"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP; imported only where they are configured."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.telemetry.spans import HEADER, Attribute, SpanKind

_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}
_propagator = TraceContextTextMapPropagator()


def exporting_provider() -> TracerProvider:
    """The tracer provider of this application; Ray may use the global one. Receiver, sampler,
    service name and batches are set by OpenTelemetry's environment variables."""
    named = OTELResourceDetector().detect()
    resource = Resource.create({SERVICE_NAME: "caravan"}).merge(named)
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class OtelSpans:
    """See serve_app.telemetry.spans.Spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("caravan")

    @contextmanager
    def span(self, name: str, kind: SpanKind, parent: str) -> Iterator["OtelSpan"]:
        started = self._tracer.start_span(name, _context(parent), _KINDS[kind])
        span = OtelSpan(started)
        try:
            yield span
        except Exception as error:
            span.fail(type(error).__name__)
            raise
        finally:
            started.end()

    def past(self, name: str, parent: str, begun_ns: int, ended_ns: int) -> None:
        started = self._tracer.start_span(name, _context(parent), start_time=begun_ns)
        started.end(ended_ns)


class OtelSpan:
    """See serve_app.telemetry.spans.Span."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get(HEADER, "")

    def set(self, **attributes: Attribute | None) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name.replace("__", "."), value)

    def fail(self, kind: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR)
        self._span.set_attribute("error.type", kind)


def _context(parent: str) -> Context:
    return _propagator.extract({HEADER: parent}, Context())
