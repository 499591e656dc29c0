"""Spans of requests, collected in memory, from the ingress to replica and encoder."""

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.engine.request import RequestOrigin, SamplingParams, Usage
from runtime.errors import ConfigurationError, OverloadedError
from serve_app.api.observing import Telemetry
from serve_app.messages.tasks import ChatDelta, ChatTask, RawText
from serve_app.telemetry import spans as spans_module
from serve_app.telemetry.exposition import no_exposition
from serve_app.telemetry.meter import NoMeter
from serve_app.telemetry.otel_spans import OtelSpans, exporting_provider
from serve_app.telemetry.reply_metrics import recorded
from serve_app.telemetry.request_spans import spanned_replies, task_span
from serve_app.telemetry.spans import SpanKind, configured_spans
from serve_app.vision.feature_transfer import FeatureClient, feature_server
from tests.checkout import ROOT
from tests.unit.runtime.vision.fake_tower import PretendTower, picture
from tests.unit.serve_app.api.operations import (
    AnyReplica,
    body_of,
    name_of,
    path_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client
from tests.unit.serve_app.sockets import listening
from tests.unit.serve_app.vision.served_encoders import CPU, NAME, encoder_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "canary-7f3a"}]}


class Collected:
    """Spans that have ended, by name."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = OtelSpans(provider)
        self.telemetry = Telemetry(meter=NoMeter(), exposition=no_exposition, spans=self.spans)

    def named(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def collected() -> Collected:
    return Collected()


async def test_the_spans_of_a_request_are_one_tree_below_the_clients(collected):
    async with http_client(PretendReplica(), telemetry=collected.telemetry) as client:
        headers = {"traceparent": PARENT, "x-request-id": "one"}
        answer = await client.post("/api/chat", json=CHAT, headers=headers)
    found = collected.named()
    parents = {name: span.parent and span.parent.span_id for name, span in found.items()}
    ids = {name: span.context.span_id for name, span in found.items()}
    assert parents == {
        "POST /api/chat": int("00f067aa0ba902b7", 16),
        "chat demo": ids["POST /api/chat"],
        "replica demo": ids["chat demo"],
        "queue": ids["replica demo"],
        "prefill": ids["replica demo"],
        "decode": ids["replica demo"],
    }
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    given = f"00-{TRACE}-{ids['POST /api/chat']:016x}-01"
    assert answer.headers["traceparent"] == given
    took = {name: found[name].end_time - found[name].start_time for name in found}
    assert (took["queue"], took["prefill"], took["decode"]) == (1000, 2000, 3000)
    assert found["queue"].end_time == found["prefill"].start_time
    attributes = dict(found["chat demo"].attributes)
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "caravan",
        "gen_ai.request.model": "demo",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 4,  # with the end token
        "caravan.request.id": "one",
    }.items() <= attributes.items()


async def test_the_spans_of_a_cancelled_answer_last_until_it_was_cancelled(collected):
    async def generate(task):
        yield ChatDelta("a", (1,), usage=Usage(7, 4, 1, 1_000, 2_000, 0))
        while True:
            yield ChatDelta("b", (2,))

    task = ChatTask("t1", "demo", RawText("hi"), SamplingParams())
    with (
        recorded(NoMeter(), task) as record,
        task_span(collected.spans, task, record) as originated,
    ):
        async with aclosing(spanned_replies(collected.spans, generate)(originated)) as deltas:
            record.note(await anext(deltas))
            first_ns = time.time_ns()
            for _ in range(4):
                record.note(await anext(deltas))
            cancelled_ns = time.time_ns()
    found = collected.named()
    prefill, decode = found["prefill"], found["decode"]
    assert found["queue"].end_time == prefill.start_time == prefill.end_time - 2_000
    assert decode.start_time == prefill.end_time <= first_ns
    assert decode.end_time >= cancelled_ns
    assert found["text_completion demo"].attributes["gen_ai.usage.output_tokens"] == 5


@pytest.mark.parametrize("parent", ["", "00-zz", f"00-{'0' * 32}-{'0' * 16}-01", "x" * 9999])
async def test_a_malformed_parent_begins_a_trace(collected, parent):
    async with http_client(PretendReplica(), telemetry=collected.telemetry) as client:
        await client.post("/api/chat", json=CHAT, headers={"traceparent": parent})
    assert collected.named()["POST /api/chat"].parent is None


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_no_span_has_a_text_of_a_user(collected, operation):
    body = json.loads(
        json.dumps(body_of(operation)).replace("Hi", "canary").replace("hot", "canary")
    )
    async with http_client(AnyReplica(), **willing(), telemetry=collected.telemetry) as client:
        await client.request(operation.method, path_of(operation), json=body)
        await client.get("/v1/models/canary?canary=canary")
    found = collected.named()
    assert f"{operation.method} {operation.path}" in found or "{" in operation.path
    assert not [name for name, span in found.items() if "canary" in name + span.to_json()]


async def test_an_unsampled_parent_is_followed(collected):
    async with http_client(PretendReplica(), telemetry=collected.telemetry) as client:
        headers = {"traceparent": PARENT[:-1] + "0"}
        answer = await client.post("/api/chat", json=CHAT, headers=headers)
    assert collected.named() == {}
    assert answer.headers["traceparent"].endswith("-00")


async def test_a_failure_is_recorded_without_its_text(collected):
    replica = PretendReplica()
    replica.error = OverloadedError("canary")
    async with http_client(replica, telemetry=collected.telemetry) as client:
        assert (await client.post("/api/chat", json=CHAT)).status_code == 503
    for name, kind in (("chat demo", "OverloadedError"), ("POST /api/chat", "503")):
        span = collected.named()[name]
        assert not span.status.is_ok
        assert span.attributes["error.type"] == kind
        assert "canary" not in span.to_json()


async def test_an_encoder_works_below_the_span_of_the_replica(collected):
    server = feature_server(encoder_of(PretendTower()), spans=collected.spans)
    client = FeatureClient(PretendTower().limits, tower=NAME, device=CPU)
    try:
        address = await server.start("127.0.0.1")
        with collected.spans.span("replica", SpanKind.SERVER, "") as replica:
            origin = RequestOrigin("one", replica.traceparent)
            await client.features(address, dataclasses.replace(picture(5), origin=origin))
    finally:
        client.close()
        await server.close(drain_s=0)
    found = collected.named()
    assert found["encode image"].parent.span_id == found["replica"].context.span_id


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []

    async def take(request: Request) -> Response:
        received.append(await request.body())
        return Response()

    app = Starlette(routes=[Route("/v1/traces", take, methods=["POST"])])
    async with listening(app) as port:
        yield f"http://127.0.0.1:{port}", received


async def test_spans_are_sent_to_the_configured_receiver(monkeypatch):
    async with receiver() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        provider = exporting_provider()
        with OtelSpans(provider).span("one", SpanKind.SERVER, ""):
            pass
        await asyncio.to_thread(provider.shutdown)
    (body,) = received
    assert b"one" in body and b"caravan" in body


def test_without_configuration_there_are_no_spans_and_opentelemetry_is_not_imported():
    assert configured_spans({}) is None
    assert (
        configured_spans({spans_module.ENDPOINTS[0]: "http://x", "OTEL_SDK_DISABLED": "true"})
        is None
    )
    assert spanned_replies(None, PretendReplica.generate) is PretendReplica.generate
    code = (
        "import sys, serve_app.api.ingress, serve_app.telemetry.request_spans as r;"
        "from serve_app.telemetry.spans import configured_spans; configured_spans({});"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "serve_app.telemetry.otel_spans", None)
    with pytest.raises(ConfigurationError, match=r"caravan\[otel\]"):
        configured_spans({spans_module.ENDPOINTS[0]: "http://x"})
