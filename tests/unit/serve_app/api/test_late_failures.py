"""What the official clients show when a request fails after the server has begun to answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import ollama
import openai
import pytest

from model_zoo.sources.pull import PullProgress
from model_zoo.store.definition import Definition
from runtime.errors import SourceError
from serve_app.api import reply as reply_module
from serve_app.on_demand.definitions import base_from_request
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.fake_replicas import PretendReplica, ingress
from tests.unit.serve_app.sockets import listening

MESSAGES = [{"role": "user", "content": "Hi"}]
NATIVE = {
    "chat": lambda client: client.chat("demo", MESSAGES),
    "generate": lambda client: client.generate("demo", "Hi"),
}
OPENAI = {
    "chat": lambda client: client.chat.completions.create(model="demo", messages=MESSAGES),
    "completion": lambda client: client.completions.create(model="demo", prompt="Hi"),
}
MANAGED = {
    "pull": lambda client: client.pull("x"),
    "create": lambda client: client.create("y", from_="x"),
    "copy": lambda client: client.copy("x", "y"),
    "delete": lambda client: client.delete("x"),
}
PROXIED = {"x-forwarded-for": "192.0.2.1"}


class FailingManagement:
    """Every operation begins, and fails once `fail` is set."""

    def __init__(self) -> None:
        self.begun = False
        self.fail = asyncio.Event()

    async def pull(self, name: str, *, insecure: bool = False) -> AsyncIterator[PullProgress]:
        self.begun = True
        yield PullProgress("pulling manifest")
        await self.fail.wait()
        raise SourceError("no space left on device")

    def base_of(self, text: str) -> Definition:
        return base_from_request(text)

    async def create(self, name: str, definition: object) -> AsyncIterator[PullProgress]:
        async for step in self.pull(name):
            yield step

    async def copy(self, source: str, destination: str) -> None:
        async for _ in self.pull(source):
            pass

    async def delete(self, name: str) -> None:
        async for _ in self.pull(name):
            pass


class Served:
    """An application on a port, whose first bytes of a reply can be awaited; `bodies`: the parts of
    all replies."""

    def __init__(self, app, replica: PretendReplica, management: FailingManagement) -> None:
        self._app = app
        self.url = ""
        self.replica = replica
        self.management = management
        self.begun = asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope, receive, send) -> None:
        async def noted(message) -> None:
            await send(message)
            self.begun.set()
            self.bodies.append(message.get("body", b""))

        await self._app(scope, receive, noted)

    def fail(self) -> None:
        self.replica.waits.set()
        self.management.fail.set()


@asynccontextmanager
async def failing() -> AsyncIterator[Served]:
    replica, management = PretendReplica(), FailingManagement()
    replica.fails_after = 1
    replica.waits.clear()
    async with ingress(replica, management=management) as app:
        served = Served(app, replica, management)
        async with listening(served) as port:
            served.url = f"http://127.0.0.1:{port}"
            yield served


async def fails_late(served: Served, call) -> BaseException:
    calling = asyncio.create_task(call)
    await until(lambda: served.replica.tasks or served.management.begun)
    await settled()
    served.fail()
    with pytest.raises(Exception) as raised:
        await calling
    return raised.value


@pytest.mark.parametrize("call", NATIVE.values(), ids=NATIVE)
async def test_ollamas_client_raises_the_reason_with_its_status(call):
    async with failing() as served:
        error = await fails_late(served, call(ollama.AsyncClient(served.url)))
    assert isinstance(error, ollama.ResponseError)
    assert (error.status_code, error.error) == (500, "the engine broke")


@pytest.mark.parametrize("call", MANAGED.values(), ids=MANAGED)
async def test_ollamas_client_raises_why_a_managed_model_was_not_changed(call):
    async with failing() as served:
        error = await fails_late(served, call(ollama.AsyncClient(served.url)))
    assert isinstance(error, ollama.ResponseError)
    assert (error.status_code, error.error) == (500, "no space left on device")


@pytest.mark.parametrize("call", OPENAI.values(), ids=OPENAI)
async def test_openais_client_raises_the_reason_with_its_status(call):
    async with failing() as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
        error = await fails_late(served, call(client))
    assert isinstance(error, openai.InternalServerError)
    assert error.status_code == 500 and "the engine broke" in str(error)


@pytest.mark.parametrize("operation", ["pull", "create"])
async def test_ollamas_client_reads_the_heartbeats_of_a_quiet_operation(operation, monkeypatch):
    monkeypatch.setattr(reply_module, "QUIET_S", 0.01)
    async with failing() as served, asyncio.timeout(HANG_S):
        client = ollama.AsyncClient(served.url)
        model = {"from_": "x"} if operation == "create" else {}
        steps = await getattr(client, operation)("y", stream=True, **model)
        assert (await anext(steps)).status == "pulling manifest"
        await until(lambda: served.bodies.count(b" ") >= 2)
        served.fail()
        with pytest.raises(ollama.ResponseError, match="no space left on device"):
            await anext(steps)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/api/chat", {"messages": MESSAGES}, "the engine broke"),
        ("/api/generate", {"prompt": "Hi"}, "the engine broke"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "the engine broke"),
        ("/v1/completions", {"prompt": "Hi"}, "the engine broke"),
        ("/api/pull", {}, "no space left on device"),
        ("/api/create", {"from": "x"}, "no space left on device"),
        ("/api/copy", {"source": "x", "destination": "y"}, "no space left on device"),
        ("/api/delete", {}, "no space left on device"),
    ],
)
async def test_a_failure_after_blanks_is_the_body_of_the_reply(path, body, reason, monkeypatch):
    method = "DELETE" if path == "/api/delete" else "POST"
    for patience in ("SINGLE_QUIET_S", "PROXY_QUIET_S"):
        monkeypatch.setattr(reply_module, patience, 0.01)
    async with failing() as served, httpx.AsyncClient(base_url=served.url) as client:
        request = {"model": "demo", "stream": False, **body}
        asking = asyncio.create_task(
            client.request(method, path, json=request, headers=PROXIED, timeout=HANG_S)
        )
        async with asyncio.timeout(HANG_S):
            await served.begun.wait()
            served.fail()
            answer = await asking  # complete, or httpx would raise
    assert answer.status_code == 200
    assert answer.text.startswith(" ")
    error = json.loads(answer.text)["error"]
    assert (error["message"] if path.startswith("/v1") else error) == reason


async def test_once_blanks_were_sent_ollamas_client_still_shows_the_reason_of_a_chat(monkeypatch):
    monkeypatch.setattr(reply_module, "SINGLE_QUIET_S", 0.01)
    async with failing() as served:
        asking = asyncio.create_task(ollama.AsyncClient(served.url).chat("demo", MESSAGES))
        async with asyncio.timeout(HANG_S):
            await served.begun.wait()
            served.fail()
            with pytest.raises(ValueError, match="the engine broke"):
                await asking
