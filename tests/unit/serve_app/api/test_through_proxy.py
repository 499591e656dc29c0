"""Requests through HAProxy and requests that bypass it; limits of the HTTP server."""

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from uvicorn.server import ServerState

from serve_app.api import http_server
from serve_app.api.http_server import MAX_HEAD_BYTES, LimitedProtocol
from serve_app.api.request_checks import CheckRequests
from serve_app.api.tenant import tenant_by_address, tenant_of
from serve_app.api.through_proxy import ThroughProxy
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client
from tests.unit.serve_app.sockets import listening

SECRET = "0123456789abcdef" * 2
PROVEN = {"x-caravan-proxy": SECRET, "x-caravan-client": "192.0.2.7 4321"}


async def seen(request: Request) -> JSONResponse:
    ours = [name for name in request.headers if name.startswith("x-caravan")]
    return JSONResponse([tenant_of(request), ours])


APP = Starlette(
    routes=[Route("/v1/x", seen)],
    middleware=[Middleware(CheckRequests, checks=[ThroughProxy(SECRET), tenant_by_address])],
)


def test_the_client_address_is_that_stated_by_haproxy() -> None:
    assert TestClient(APP).get("/v1/x", headers=PROVEN).json() == ["192.0.2.7", []]


@pytest.mark.parametrize(
    "headers",
    [{}, {**PROVEN, "x-caravan-proxy": "guess"}, {**PROVEN, "x-caravan-proxy": SECRET[:-1]},
     {"x-caravan-client": "192.0.2.7 1"}, {**PROVEN, "x-caravan-proxy": "é"}],
)  # fmt: skip
def test_requests_that_bypass_haproxy_are_refused(headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    response = TestClient(APP).get("/v1/x", headers=encoded)  # type: ignore[arg-type]
    assert response.status_code == 403
    assert response.headers["connection"] == "close"
    assert "from the server's HAProxy only" in response.json()["error"]["message"]


async def test_the_ingress_refuses_every_path_without_the_secret() -> None:
    async with http_client(PretendReplica(), proxy_secret=SECRET) as client:
        for path in ("/", "/healthz", "/v1/models"):
            assert (await client.get(path)).status_code == 403
            assert (await client.get(path, headers=PROVEN)).status_code == 200


async def test_an_ingress_without_a_secret_accepts_direct_requests() -> None:
    async with http_client(PretendReplica()) as client:
        assert (await client.get("/healthz")).status_code == 200


async def ok(scope, receive, send) -> None:
    await JSONResponse(scope["client"][0])(scope, receive, send)


class Wire(asyncio.Transport):
    """Collects what a server writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True


async def test_an_endless_header_is_refused() -> None:
    server, wire = LimitedProtocol(uvicorn.Config(ok), ServerState(), {}), Wire()
    server.connection_made(wire)
    server.data_received(b"GET / HTTP/1.1\r\nX-Long: ")
    for _ in range(4):
        assert not wire.closed
        server.data_received(b"a" * (MAX_HEAD_BYTES // 4))
    server.data_received(b"a")
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 400")
    assert wire.written.endswith(b"have more than 65,536 bytes.")


CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (b"0\r\n", b"x-field: " + b"a" * 1000 + b"\r\n"),
        (b"0\r\nx-field: ", b"a" * 1000),
        (b"1\r\na\r\n1;", b"a" * 1000),
    ],
    ids=["many", "long", "of a chunk"],
)
async def test_endless_fields_after_a_head_are_refused(begin: bytes, endless: bytes) -> None:
    server, wire = LimitedProtocol(uvicorn.Config(ok), ServerState(), {}), Wire()
    server.connection_made(wire)
    server.data_received(CHUNKED + begin)
    for _ in range(MAX_HEAD_BYTES // len(endless)):
        assert not wire.closed
        server.data_received(endless)
    server.data_received(endless)
    assert wire.closed and wire.written.startswith(b"HTTP/1.1 400")
    assert server.scope["headers"] == [(b"transfer-encoding", b"chunked")]


async def test_fields_after_a_body_are_discarded_and_small_chunks_are_not_limited() -> None:
    seen: list[Any] = []

    async def app(scope, receive, send) -> None:
        request = Request(scope, receive)
        seen.append((len(await request.body()), request.headers.get("x-caravan-proxy")))
        await JSONResponse(None)(scope, receive, send)

    async with listening(app, http=LimitedProtocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(CHUNKED + b"1\r\na\r\n" * MAX_HEAD_BYTES)
            writer.write(b"0\r\nx-caravan-proxy: guess\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"null")
        writer.close()
    assert seen == [(MAX_HEAD_BYTES, None)] * 2


async def test_usual_heads_and_large_bodies_are_not_limited() -> None:
    async with listening(ok, http=LimitedProtocol) as port, httpx.AsyncClient() as client:
        for _ in range(2):  # on one connection
            response = await client.post(
                f"http://127.0.0.1:{port}/",
                headers={"x-long": "a" * (MAX_HEAD_BYTES // 2)},
                content=b"a" * 2**20,
            )
            assert response.status_code == 200


async def test_the_server_that_ray_starts_has_the_limit_and_trusts_no_header(monkeypatch) -> None:
    registry = dict(uvicorn.config.HTTP_PROTOCOLS)
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", registry)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.1")
    monkeypatch.delenv("FORWARDED_ALLOW_IPS")
    http_server.configure(os.environ)
    config = uvicorn.Config(ok)
    config.load()
    assert config.http_protocol_class is LimitedProtocol
    transport = httpx.ASGITransport(config.loaded_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/", headers={"x-forwarded-for": "192.0.2.9"})
    assert response.json() == "127.0.0.1"


def test_memory_of_freed_bodies_is_returned_to_the_system_with_glibc(monkeypatch) -> None:
    set_to: list[tuple[int, int]] = []
    glibc = SimpleNamespace(mallopt=lambda *given: set_to.append(given))
    for library in (glibc, SimpleNamespace()):
        monkeypatch.setattr(http_server.ctypes, "CDLL", lambda _, library=library: library)
        http_server.return_large_allocations()
    assert set_to == [(-3, http_server.MMAP_BYTES)]
