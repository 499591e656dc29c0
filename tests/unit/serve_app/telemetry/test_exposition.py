"""`/metrics`: the agents of all nodes are asked, and those that do not answer are counted."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serve_app.telemetry import exposition
from serve_app.telemetry.exposition import ClusterExposition
from tests.loopback import free_port
from tests.unit.serve_app.sockets import listening

TEXT = "# HELP ray_caravan_x d\n# TYPE ray_caravan_x gauge\nray_caravan_x 1.0\n"


@pytest_asyncio.fixture
async def agents() -> AsyncIterator[tuple[str, list[str]]]:
    asked: list[str] = []

    async def answer(request: Request) -> Response:
        asked.append(request.url.path)
        status = 500 if request.url.path == "/broken" else 200
        return PlainTextResponse(TEXT * (1000 if request.url.path == "/long" else 1), status)

    app = Starlette(routes=[Route("/{name}", answer)])
    async with listening(app) as port:
        yield f"http://127.0.0.1:{port}", asked


async def test_agents_that_fail_are_counted_and_the_others_shown(agents, monkeypatch):
    monkeypatch.setattr(exposition, "MAX_AGENT_BYTES", 1000)
    url, _ = agents
    closed = f"http://127.0.0.1:{free_port()}/"

    async def urls() -> list[str]:
        return [f"{url}/one", f"{url}/broken", f"{url}/long", closed]

    text = await ClusterExposition(urls)()
    assert "caravan_x{} 1.0\n" in text
    assert "caravan_nodes_unreachable 3\n" in text


async def test_concurrent_readers_share_the_answers(agents):
    url, asked = agents

    async def urls() -> list[str]:
        return [f"{url}/one"]

    cluster = ClusterExposition(urls)
    texts = await asyncio.gather(*(cluster() for _ in range(5)))
    assert len(set(texts)) == 1
    assert asked == ["/one"]
