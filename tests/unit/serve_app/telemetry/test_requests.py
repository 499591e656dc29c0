"""Metrics of requests and answers, through the whole ingress with a fake model."""

import pytest

from runtime.errors import OverloadedError, RequestError
from serve_app.api.observing import Telemetry
from serve_app.telemetry import metrics
from serve_app.telemetry.exposition import no_exposition
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.operations import (
    AnyReplica,
    body_of,
    name_of,
    path_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client
from tests.unit.serve_app.telemetry.recording_meter import RecordingMeter

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
KEYS = (api_key("ann"), api_key("root", manage=True))


def observing(meter: RecordingMeter) -> dict[str, Telemetry]:
    return {"telemetry": Telemetry(meter=meter, exposition=no_exposition)}


def as_key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_an_answer_is_counted_for_its_model_and_key():
    meter = RecordingMeter()
    async with http_client(PretendReplica(), api_keys=KEYS, **observing(meter)) as client:
        await client.post("/api/chat", json=CHAT, headers=as_key("ann"))
    name = metrics.REPLIES.name
    assert meter.totals[name, "demo", "ann", "stop"] == 1
    assert meter.totals[metrics.REQUESTS.name, "ollama", "200", "ann"] == 1
    counted = {
        metric.name: meter.totals[metric.name, "demo", "ann"]
        for metric in (metrics.PROMPT_TOKENS, metrics.CACHED_TOKENS, metrics.COMPLETION_TOKENS)
    }
    assert list(counted.values()) == [7, 4, 4]
    (waited,) = meter.observed[metrics.FIRST_TOKEN_SECONDS.name, "demo", "ann"]
    (mean,) = meter.observed[metrics.BETWEEN_TOKENS_SECONDS.name, "demo", "ann"]
    (gap,) = meter.observed[metrics.LONGEST_GAP_SECONDS.name, "demo"]
    assert waited > 0
    assert 0 <= mean <= gap
    (queued,) = meter.observed[metrics.QUEUE_SECONDS.name, "demo"]
    assert 1e-6 <= queued <= waited


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_every_protocol_is_counted(operation):
    meter = RecordingMeter()
    async with http_client(AnyReplica(), **willing(), **observing(meter)) as client:
        await client.request(operation.method, path_of(operation), json=body_of(operation))
    protocol = operation.protocol.lower()
    assert meter.totals[metrics.REQUESTS.name, protocol, "200", ""] == 1


@pytest.mark.parametrize(
    ("path", "key", "status", "protocol"),
    [
        ("/api/chat", None, "401", "ollama"),
        ("/v1/none", "ann", "404", "openai"),
        ("/elsewhere", "ann", "404", "other"),
        ("/api/pull", "ann", "403", "ollama"),
    ],
)
async def test_refused_requests_are_counted(path, key, status, protocol):
    meter = RecordingMeter()
    async with http_client(PretendReplica(), api_keys=KEYS, **observing(meter)) as client:
        await client.post(path, json={}, headers={} if key is None else as_key(key))
    requests = {key: n for key, n in meter.totals.items() if key[0] == metrics.REQUESTS.name}
    assert requests == {(metrics.REQUESTS.name, protocol, status, key or ""): 1}


@pytest.mark.parametrize(
    ("error", "fails_after", "finish"),
    [
        (RequestError("no"), None, "refused"),
        (OverloadedError("full"), None, "error"),
        (None, 1, "error"),
    ],
)
async def test_failed_answers_are_counted_by_their_cause(error, fails_after, finish):
    meter, replica = RecordingMeter(), PretendReplica()
    replica.error, replica.fails_after = error, fails_after
    async with http_client(replica, **observing(meter)) as client:
        await client.post("/api/chat", json=CHAT)
    assert meter.totals[metrics.REPLIES.name, "demo", "", finish] == 1
    refusals = meter.totals[metrics.FAILOVERS.name, "demo", "refused"]
    assert bool(refusals) == isinstance(error, OverloadedError)


async def test_only_keys_that_manage_see_the_metrics():
    async with http_client(PretendReplica(), api_keys=KEYS) as client:
        statuses = [
            (await client.get("/metrics", headers=headers)).status_code
            for headers in ({}, as_key("ann"), as_key("root"))
        ]
    assert statuses == [401, 403, 200]


async def test_without_keys_foreign_pages_do_not_see_the_metrics():
    async with http_client(PretendReplica(), allowed_origins=("https://a.example",)) as client:
        for origin, status in (("https://a.example", 403), ("http://localhost:1", 200)):
            answer = await client.get("/metrics", headers={"origin": origin})
            assert answer.status_code == status
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.text.endswith("caravan_nodes_unreachable 0\n")
