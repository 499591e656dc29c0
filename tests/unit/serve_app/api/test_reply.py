"""Replies at the ASGI interface: when the status is sent, and disconnected clients."""

import asyncio
import json

import pytest
from openai._streaming import SSEDecoder

from runtime.engine.request import FinishReason
from runtime.errors import OverloadedError, ReplicaLostError, RequestError
from serve_app.api import reply as reply_module
from serve_app.api.ollama import NativeEncoder
from serve_app.api.openai import ChoicesEncoder
from serve_app.api.openai_chat import KIND, ChatChoice
from serve_app.api.reply import Reply
from serve_app.api.reply_reader import ReplyReader
from serve_app.messages.tasks import ChatDelta
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.api.test_responses import encoder as response_encoder
from tests.unit.serve_app.api.test_responses import events

ENCODERS = {
    "native": lambda: NativeEncoder("message"),
    "openai": lambda: ChoicesEncoder(
        KIND, "demo", "t", [ChatChoice(0, ReplyReader())], usage_wanted=False
    ),
}


class Server:
    """The other side of an ASGI application; `leave` is the client closing its connection."""

    def __init__(self) -> None:
        self.sent: list[dict] = []
        self.said_something = asyncio.Event()
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self):
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if message.get("body"):
            self.said_something.set()

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def answer(server: Server, reply: Reply) -> None:
    async with asyncio.timeout(HANG_S):
        await reply({"type": "http"}, server.receive, server.send)


@pytest.mark.parametrize("protocol", ENCODERS)
async def test_a_stream_that_breaks_ends_with_the_protocols_error(protocol):
    server = Server()

    async def deltas():
        yield ChatDelta("partial")
        raise ReplicaLostError("the replica is gone")

    await answer(server, Reply(deltas(), ENCODERS[protocol](), stream=True))
    assert server.status == 200
    last = server.text.strip().splitlines()[-1].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert (error if protocol == "native" else error["message"]) == "the replica is gone"
    assert "[DONE]" not in server.text
    assert server.sent[-1]["more_body"] is False


@pytest.mark.parametrize("protocol", ENCODERS)
async def test_a_single_reply_that_breaks_is_an_error_status(protocol):
    server = Server()

    async def deltas():
        yield ChatDelta("partial")
        raise ReplicaLostError("the replica is gone")

    await answer(server, Reply(deltas(), ENCODERS[protocol](), stream=False))
    assert server.status == 500
    assert "partial" not in server.text


async def test_no_status_is_sent_before_the_first_delta():
    server = Server()
    refused = asyncio.Event()

    async def deltas():
        await refused.wait()
        raise RequestError("no")
        yield ChatDelta()

    answering = asyncio.create_task(
        answer(server, Reply(deltas(), NativeEncoder("message"), stream=True))
    )
    await settled()
    assert server.sent == []
    refused.set()
    await answering
    assert server.status == 400


@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_of_a_reply_waits_for_its_ending_callback(stream):
    server = Server()
    sent_before = []

    async def deltas():
        yield ChatDelta("first ")
        yield ChatDelta("last", finish=FinishReason.STOP)

    async def ending():
        sent_before.append(server.text)

    encoder = NativeEncoder("message")
    await answer(server, Reply(deltas(), encoder, stream=stream, ending=ending))
    assert [("first" in text, "last" in text) for text in sent_before] == [(stream, False)]
    assert "last" in server.text


async def test_messages_of_unexpected_errors_are_not_sent():
    server = Server()

    async def deltas():
        raise ZeroDivisionError("secret")
        yield ChatDelta()

    await answer(server, Reply(deltas(), NativeEncoder("message"), stream=False))
    assert server.status == 500
    assert "secret" not in server.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_disconnects_ends_the_generation(stream, begun):
    server = Server()
    ended = asyncio.Event()
    waiting = asyncio.Event()

    async def deltas():
        try:
            if begun:
                yield ChatDelta("partial")
            waiting.set()
            await asyncio.Event().wait()
            yield ChatDelta(finish=FinishReason.STOP)
        finally:
            ended.set()

    answering = asyncio.create_task(
        answer(server, Reply(deltas(), NativeEncoder("message"), stream=stream))
    )
    async with asyncio.timeout(HANG_S):
        await waiting.wait()
        server.leave()
        await answering
    assert ended.is_set()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("protocol", ENCODERS)
async def test_a_quiet_stream_gets_heartbeats(protocol, begun, monkeypatch):
    monkeypatch.setattr(reply_module, "QUIET_S", 0.01)
    server = Server()

    async def deltas():
        if begun:
            yield ChatDelta("one")
        before = server.text
        await until(lambda: server.text != before)
        if not begun:
            yield ChatDelta("one")
        yield ChatDelta(" two", finish=FinishReason.STOP)

    await answer(server, Reply(deltas(), ENCODERS[protocol](), stream=True))
    assert [message["type"] for message in server.sent].count("http.response.start") == 1
    assert server.status == 200
    assert read(protocol, server.text) == "one two"


async def test_a_quiet_response_of_openais_repeats_an_event(monkeypatch):
    """Codex gives up a stream in which there is no event for five minutes; comments are none."""
    monkeypatch.setattr(reply_module, "QUIET_S", 0.01)
    server, encoder = Server(), response_encoder()

    async def deltas():
        await until(lambda: server.text.count("event: response.in_progress") > 2)
        yield ChatDelta("one")
        before = server.text
        await until(lambda: server.text.count("in_progress") > before.count("in_progress") + 2)
        yield ChatDelta(" two", finish=FinishReason.STOP)

    await answer(server, Reply(deltas(), encoder, stream=True))
    found = [each["type"].removeprefix("response.") for each in events(server.text, strict=False)]
    assert found[:3] == ["created", "in_progress", "in_progress"]
    assert found[-1] == "completed"
    assert encoder.heartbeat == b":\n\n"  # no event follows the last one


def read(protocol: str, text: str) -> str:
    """The answer as the official clients read a stream: lines of JSON, or events."""
    if protocol == "native":
        return "".join(json.loads(line)["message"]["content"] for line in text.splitlines())
    events = SSEDecoder().iter_bytes(iter([text.encode()]))
    reported = [json.loads(event.data) for event in events if event.data != "[DONE]"]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in reported)


async def test_a_failure_after_a_heartbeat_is_reported_in_the_stream(monkeypatch):
    monkeypatch.setattr(reply_module, "QUIET_S", 0.01)
    server = Server()

    async def deltas():
        await server.said_something.wait()
        raise OverloadedError("nobody has room")
        yield ChatDelta()

    await answer(server, Reply(deltas(), NativeEncoder("message"), stream=True))
    assert server.status == 200
    assert json.loads(server.text)["error"].endswith("nobody has room")
    assert server.sent[-1]["more_body"] is False


async def test_a_long_single_reply_sends_blanks_until_it_is_complete(monkeypatch):
    monkeypatch.setattr(reply_module, "SINGLE_QUIET_S", 0.01)
    server = Server()

    async def deltas():
        yield ChatDelta("one")
        await server.said_something.wait()
        yield ChatDelta(" two", finish=FinishReason.STOP)

    await answer(server, Reply(deltas(), NativeEncoder("message"), stream=False))
    assert server.status == 200
    assert server.text.startswith(" ")
    assert json.loads(server.text)["message"]["content"] == "one two"


@pytest.mark.parametrize("protocol", ENCODERS)
async def test_a_single_reply_that_breaks_late_ends_with_the_reason(protocol, monkeypatch):
    monkeypatch.setattr(reply_module, "SINGLE_QUIET_S", 0.01)
    server = Server()

    async def deltas():
        yield ChatDelta("one")
        await server.said_something.wait()
        raise ReplicaLostError("the replica is gone")

    await answer(server, Reply(deltas(), ENCODERS[protocol](), stream=False))
    assert server.status == 200
    assert server.text.startswith(" ")
    error = json.loads(server.text)["error"]
    assert (error if protocol == "native" else error["message"]) == "the replica is gone"
    assert server.sent[-1]["more_body"] is False
