"""No text of a user and no API key is logged, for any request and any failure."""

import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from model_zoo.chat.messages import Message
from model_zoo.sources.pull import PullProgress
from model_zoo.store.definition import Definition
from runtime.errors import OverloadedError
from serve_app import logs
from serve_app.api import observing, reply
from serve_app.api.keys import key_hash
from serve_app.logs import structure_records
from serve_app.messages.tasks import ChatDelta, ChatTask, Task
from serve_app.on_demand import store_manager, store_operations
from serve_app.transport import stream_server
from serve_app.vision import feature_transfer
from tests.patience import until
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.operations import (
    AnyReplica,
    body_of,
    name_of,
    path_of,
    replaced,
    values_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import http_client
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of

CANARY = "canary-7f3a"
KEY = f"sk-{CANARY}"
DEBUG = {logs.LEVEL: "debug"}
LOGGING = (reply, observing, stream_server, feature_transfer)


class Unforeseen(Exception):
    """An exception that quotes what it was given."""


class FailingReplica(AnyReplica):
    """Fails with the prompt in the exception, at once or after a first delta."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.late = late

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:  # type: ignore[override]
        if self.late and isinstance(task, ChatTask):
            yield ChatDelta("x", (1,))
        try:
            raise KeyError(f"{CANARY} {task}")
        except KeyError as error:
            raise Unforeseen(f"{CANARY} {task}") from error


@pytest.fixture(autouse=True)
def everything_logged(monkeypatch) -> None:
    """All lines, and all records of `logging` as the processes of the application write them."""
    for module in LOGGING:
        monkeypatch.setattr(module, "log", logs.get_logger(DEBUG))
    structure_records(DEBUG)


def lines(capsys) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert CANARY not in captured.out + captured.err
    return [json.loads(line) for line in captured.err.splitlines() if line.startswith('{"event"')]


def bodies(operation) -> Iterator[Any]:
    """The valid body with the canary in place of each text, and bodies that are refused."""
    valid = body_of(operation)
    for place, value in values_of(valid):
        if isinstance(value, str) and place and place != ("model",):
            yield replaced(valid, place, CANARY)
    yield {**valid, "model": CANARY}
    yield {**valid, "stream": CANARY}


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_no_text_of_a_request_is_logged(operation, capsys):
    keys = (api_key("ann", sha256=key_hash(KEY), manage=True),)
    headers = {"authorization": f"Bearer {KEY}", "user-agent": CANARY, "cookie": f"a={CANARY}"}
    async with http_client(AnyReplica(), api_keys=keys, **willing()) as client:
        path = f"{path_of(operation)}?q={CANARY}"
        for body in bodies(operation):
            await client.request(operation.method, path, json=body, headers=headers)
        await client.request(operation.method, path, content=f'{{"{CANARY}', headers=headers)
        wrong = {"authorization": f"Bearer x{KEY}", "x-api-key": f"{KEY}y"}
        await client.request(operation.method, path, json=body_of(operation), headers=wrong)
    statuses = {line["status"] for line in lines(capsys) if line["event"] == "request"}
    assert {200, 400, 401} <= statuses


@pytest.mark.parametrize("way", ["fails", "is cancelled", "is refused"])
async def test_no_text_of_a_new_model_is_logged(way, tmp_path, monkeypatch, capsys):
    begun = threading.Event()

    def create(name, definition, store, *, progress, environment) -> None:
        begun.set()
        if way == "fails":
            raise Unforeseen(f"{CANARY} {definition}")
        while True:
            progress(PullProgress("working"))
            time.sleep(0.001)

    def refuse(definition) -> None:
        raise Unforeseen(f"{CANARY} {definition}")

    monkeypatch.setattr(store_manager, "create", create)
    if way == "is refused":
        monkeypatch.setattr(store_manager, "_check_file", refuse)
    for module in (store_manager, store_operations):
        monkeypatch.setattr(module, "log", logs.get_logger(DEBUG))
    definition = Definition(system=CANARY, messages=(Message("user", CANARY),))
    async with cluster_of(tmp_path) as cluster:
        manager = cluster.processes[0].store_manager
        result = await manager.call("create", "id", "own", definition, way == "is refused")
        if way != "is refused":
            assert result.failed is None
            await until(begun.is_set)
            manager.operations.close()
            with pytest.raises((Unforeseen, OverloadedError)):
                await until(lambda: manager.operations.follow("id", 0).done)
    logged = [line for line in lines(capsys) if line["event"] != "request"]
    if way == "is refused":
        assert [(line["event"], line["error"]) for line in logged] == [
            ("call failed", "Unforeseen")
        ]
    else:
        event = {"fails": "operation failed", "is cancelled": "operation cancelled"}[way]
        assert logged[0]["event"].startswith(event)
        assert logged[0]["operation"] == "create own:latest"


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("stream", [False, True], ids=["single", "stream"])
@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_no_text_of_an_unforeseen_failure_is_logged(operation, stream, late, capsys):
    body = {**body_of(operation), "stream": stream}
    async with http_client(FailingReplica(late=late), **willing()) as client:
        headers = {"x-request-id": "id-1"}
        await client.request(operation.method, path_of(operation), json=body, headers=headers)
    for line in lines(capsys):
        if line["event"] == "work failed":
            assert line["error"] == "Unforeseen from KeyError"
            assert "test_log_privacy.py" in line["traceback"]
            assert line["request"] == "id-1"


def test_records_of_logging_have_no_texts_of_exceptions(capsys):
    logger = logging.getLogger("runtime.engine.async_engine")
    try:
        raise Unforeseen(CANARY)
    except Unforeseen:
        logger.exception("the engine loop failed")
    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["error"]) == (
        "the engine loop failed",
        "error",
        "Unforeseen",
    )
