"""HTTP/1.0 over real sockets."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.responses import Response

from runtime.engine.request import FinishReason
from serve_app.api import connections
from serve_app.api import reply as reply_module
from serve_app.api.connections import REFUSAL_DELAY_S, ConnectionRules
from serve_app.api.ollama import NativeEncoder
from serve_app.api.reply import Reply
from serve_app.messages.tasks import ChatDelta
from tests.patience import HANG_S
from tests.unit.serve_app.fake_replicas import PretendReplica, ingress
from tests.unit.serve_app.sockets import listening

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def serving(http: str, replica: PretendReplica | None = None):
    async with ingress(replica or PretendReplica()) as app, listening(app, http=http) as port:
        yield port


async def ask(port: int, version: str, body: dict | None, *headers: str, path="/api/chat") -> bytes:
    """All bytes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    lines = [f"{method} {path} HTTP/{version}", f"Content-Length: {len(data)}", *headers, "", ""]
    writer.write("\r\n".join(lines).encode() + data)
    try:
        async with asyncio.timeout(HANG_S):
            return await reader.read()
    finally:
        writer.close()


def parted(reply: bytes) -> tuple[dict[str, str], bytes]:
    head, _, body = reply.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")[1:]
    return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}, body


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks(http, stream):
    async with serving(http) as port:
        headers, body = parted(await ask(port, "1.0", {**CHAT, "stream": stream}))
    assert "transfer-encoding" not in headers
    assert int(headers["content-length"]) == len(body)
    lines = [json.loads(line) for line in body.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Hello, world"


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_long_single_reply_to_http_1_0_has_its_blanks_and_no_chunks(http, monkeypatch):
    monkeypatch.setattr(reply_module, "SINGLE_QUIET_S", 0.01)
    said = asyncio.Event()

    async def deltas():
        yield ChatDelta("one")
        await said.wait()
        yield ChatDelta(" two", finish=FinishReason.STOP)

    async def app(scope, receive, send) -> None:
        async def noted(message) -> None:
            await send(message)
            if message.get("body") == b" ":
                said.set()

        await Reply(deltas(), NativeEncoder("message"), stream=False)(scope, receive, noted)

    async with listening(ConnectionRules(app), http=http) as port:
        headers, body = parted(await ask(port, "1.0", {}))
    assert "transfer-encoding" not in headers
    assert int(headers["content-length"]) == len(body)
    assert body.startswith(b" ") and json.loads(body)["message"]["content"] == "one two"


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_replies_of_known_length_are_the_same_for_http_1_0(http):
    async with serving(http) as port:
        headers, body = parted(await ask(port, "1.0", None, path="/api/version"))
        assert int(headers["content-length"]) == len(body)
        assert "version" in json.loads(body)
        headers, body = parted(await ask(port, "1.0", {**CHAT, "model": "x"}))
        assert int(headers["content-length"]) == len(body)
        assert "not found" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("version", "header"),
    [
        ("1.1", "Host: localhost"),
        ("1.0", "X-Forwarded-For: 192.0.2.1"),
        ("1.0", "X-Real-IP: 192.0.2.1"),
        ("1.0", "Forwarded: for=192.0.2.1"),
        ("1.0", "Via: 1.0 proxy"),
    ],
)
async def test_streams_to_http_1_1_and_proxies_are_sent_as_they_are_produced(version, header):
    replica = PretendReplica()
    replica.waits.clear()
    async with serving("httptools", replica) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps(CHAT).encode()
        lines = [f"POST /api/chat HTTP/{version}", f"Content-Length: {len(data)}", header, "", ""]
        writer.write("\r\n".join(lines).encode() + data)
        async with asyncio.timeout(HANG_S):
            begin = await reader.readuntil(b'"Hello"')  # while the rest waits
            assert b"transfer-encoding: chunked" in begin
            replica.waits.set()
            assert b"world" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


async def headers_of_reply(port: int, length: int, sent: bytes, path: str) -> dict[str, str]:
    """To a request whose body has `length` bytes, of which `sent` are sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"

    def exchange() -> bytes:
        # Not asyncio's streams: they lose what came before a reset.
        with socket.create_connection(("127.0.0.1", port), HANG_S) as connection:
            with suppress(ConnectionError):
                connection.sendall(head.encode() + sent)
            return connection.recv(4096)

    headers, _ = parted(await asyncio.to_thread(exchange))
    return headers


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_connection_is_closed_when_a_large_body_was_not_read(http):
    async with serving(http) as port:
        headers = await headers_of_reply(port, 16 * 2**20, b" " * 1000, "/nothing")
    assert headers["connection"] == "close"


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_connection_is_closed_when_a_body_is_refused_halfway(http):
    async with serving(http) as port:
        headers = await headers_of_reply(port, 16 * 2**20, b"{" + b"[" * 2**17, "/api/chat")
    assert headers["connection"] == "close"


async def test_only_the_refusal_of_an_unread_large_body_is_delayed(monkeypatch):
    delays = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr(connections.asyncio, "sleep", sleep)
    monkeypatch.setattr(connections, "REFUSAL_DELAY_S", REFUSAL_DELAY_S)  # as outside of tests
    sent = []

    async def send(message) -> None:
        sent.append(message["type"])

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def refuse(scope, receive, send) -> None:
        await Response(status_code=413)(scope, receive, send)

    async def read(scope, receive, send) -> None:
        await receive()
        await refuse(scope, receive, send)

    for app, length in ((refuse, 100), (read, 2**20), (refuse, 2**20)):
        headers = [(b"content-length", str(length).encode())]
        scope = {"type": "http", "http_version": "1.1", "headers": headers}
        assert not delays
        await ConnectionRules(app)(scope, receive, send)
    (delay,) = delays
    shortest, longest = REFUSAL_DELAY_S
    assert shortest <= delay <= longest
    assert sent == ["http.response.start", "http.response.body"] * 3


async def test_a_connection_is_kept_when_a_small_body_was_not_read():
    async with serving("httptools") as port:
        headers = await headers_of_reply(port, 100, b" " * 100, "/nothing")
    assert "connection" not in headers


async def test_a_connection_is_kept_when_a_large_body_was_read_before_the_refusal():
    body = b'{"model": "none", "prompt": "' + b"a" * 2**17 + b'"}'
    large = ingress(PretendReplica(), max_body_bytes=2**20)
    async with large as app, listening(app, http="httptools") as port:
        headers = await headers_of_reply(port, len(body), body, "/api/generate")
    assert "connection" not in headers
