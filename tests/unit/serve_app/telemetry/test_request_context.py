"""One id for a request, from the ingress to replica and encoder."""

import json

import pytest

from runtime.engine.request import RequestOrigin
from serve_app import logs
from serve_app.api.observing import Telemetry
from serve_app.telemetry.exposition import no_exposition
from serve_app.telemetry.meter import NoMeter
from serve_app.telemetry.request_context import begin_work, current_request
from serve_app.transport import generation
from tests.unit.serve_app.api.operations import (
    AnyReplica,
    body_of,
    name_of,
    path_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123", True),
        ("a" * 128, True),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        (None, False),
        ("", False),
        ("a" * 129, False),
        ("a b", False),
        ('a"b', False),
        ("a\u00e9", False),
    ],
)
async def test_a_sane_id_of_the_client_is_kept_and_another_replaced(given, kept):
    replica = PretendReplica()
    headers = [] if given is None else [(b"x-request-id", given.encode())]
    async with http_client(replica) as client:
        answers = [await client.post("/api/chat", json=CHAT, headers=headers) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [task.origin.id for task in replica.tasks] == ids
    if kept:
        assert ids == [given, given]
    else:
        assert len(set(ids)) == 2
        assert all(len(each) == 32 for each in ids)


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_every_task_has_the_id_of_its_request(operation, monkeypatch):
    seen = set()
    monkeypatch.setattr(generation, "begin_work", lambda origin: seen.add(origin.id))
    async with http_client(AnyReplica(), **willing()) as client:
        headers = {"x-request-id": "one"}
        answer = await client.request(
            operation.method, path_of(operation), json=body_of(operation), headers=headers
        )
    assert answer.headers["x-request-id"] == "one"
    assert seen <= {"one"}


@pytest.mark.parametrize(("given", "sent"), [("one", False), ("a b", True)])
async def test_an_id_that_the_server_echoes_is_not_sent_twice(given, sent):
    telemetry = Telemetry(meter=NoMeter(), exposition=no_exposition, ids_echoed=True)
    async with http_client(PretendReplica(), telemetry=telemetry) as client:
        answer = await client.get("/healthz", headers={"x-request-id": given})
    assert ("x-request-id" in answer.headers) == sent


async def test_an_error_response_has_the_id():
    async with http_client(PretendReplica()) as client:
        answer = await client.get("/none", headers={"x-request-id": "one"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "one")


async def test_lines_of_the_work_have_the_id(capsys):
    token = current_request.set(None)
    try:
        begin_work(RequestOrigin("one"))
        logs.get_logger().info("a")
        begin_work(RequestOrigin())
        logs.get_logger().info("b")
    finally:
        current_request.reset(token)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["request"] == "one"
    assert "request" not in second


def test_lines_for_people_and_levels_are_settings(capsys):
    logs.get_logger({logs.FORMAT: "text", logs.LEVEL: "debug"}).debug("answered", model="demo")
    logs.get_logger({}).debug("hidden")
    logs.get_logger({logs.LEVEL: "warning"}).info("hidden")
    text = capsys.readouterr().err
    assert "answered" in text
    assert "model=demo" in text
    assert "hidden" not in text
    assert not text.startswith("{")
