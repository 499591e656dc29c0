"""Limits of keys and addresses seen from HTTP, with a clock that the test sets."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from runtime.engine.request import FinishReason, Usage
from runtime.errors import GenerationFailedError
from serve_app.api.limits import Limits, TenantLimits
from serve_app.api.rate_limiting import metered
from serve_app.messages.tasks import ChatDelta
from tests.patience import until
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client, ingress
from tests.virtual_time import Clock

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": False}
# The tokens of an answer that the fake model reports.
PROMPT, COMPLETION = 7, 3


def header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(client, key: str, path: str = "/api/chat") -> int:
    return (await client.post(path, json=CHAT, headers=header(key))).status_code


async def test_requests_beyond_a_keys_limit_are_429_in_the_shape_of_the_protocol():
    clock = Clock()
    keys = (api_key("a", requests_per_minute=2), api_key("b"))
    replica = PretendReplica()
    async with http_client(replica, api_keys=keys, clock=clock) as client:
        assert [await status(client, "a") for _ in range(3)] == [200, 200, 429]
        assert await status(client, "b") == 200
        asked = len(replica.tasks)
        native = await client.post("/api/chat", json=CHAT, headers=header("a"))
        assert native.headers["retry-after"] == "30"
        assert "client 'a' has reached its limit `requests_per_minute`" in native.json()["error"]
        openai = await client.post("/v1/chat/completions", json=CHAT, headers=header("a"))
        error = openai.json()["error"]
        assert (openai.status_code, openai.headers["retry-after"]) == (429, "30")
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert len(replica.tasks) == asked
        clock.now_s += 30
        assert await status(client, "a") == 200


async def test_refusals_are_logged_once_a_minute_without_the_key(capsys):
    clock = Clock()
    keys = (api_key("secret", name="alice", requests_per_minute=1),)
    async with http_client(PretendReplica(), api_keys=keys, clock=clock) as client:
        for reported in (1, 2):
            assert [await status(client, "secret") for _ in range(4)] == [200, 429, 429, 429]
            lines = [line for line in capsys.readouterr().err.splitlines() if "limit" in line]
            assert len(lines) == 1, reported
            line = json.loads(lines[0])
            assert (line["client"], line["limit"]) == ("alice", "requests_per_minute")
            assert "secret" not in lines[0]
            clock.now_s += 60


async def test_a_body_is_not_read_before_the_limits_are_checked():
    keys = (api_key("a", requests_per_minute=1),)
    async with http_client(PretendReplica(), api_keys=keys, clock=Clock()) as client:
        assert await status(client, "a") == 200

        async def body():
            raise AssertionError("it is read")
            yield b""

        answer = await client.post("/api/chat", content=body(), headers=header("a"))
        assert answer.status_code == 429


async def test_headers_state_the_remaining_budget():
    clock = Clock()
    keys = (api_key("a", requests_per_minute=60, tokens_per_minute=1200), api_key("b"))
    async with http_client(PretendReplica(), api_keys=keys, clock=clock) as client:
        first = await client.post("/api/chat", json=CHAT, headers=header("a"))
        assert first.headers["x-ratelimit-limit-requests"] == "60"
        assert first.headers["x-ratelimit-remaining-requests"] == "59"
        assert first.headers["x-ratelimit-reset-requests"] == "1s"
        assert first.headers["x-ratelimit-limit-tokens"] == "1200"
        second = await client.get("/v1/models", headers=header("a"))
        assert second.headers["x-ratelimit-remaining-requests"] == "59"
        assert second.headers["x-ratelimit-remaining-tokens"] == str(1200 - PROMPT - COMPLETION)
        other = await client.post("/api/chat", json=CHAT, headers=header("b"))
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
async def test_tokens_of_answers_are_charged_and_a_spent_budget_refuses(path, stream):
    clock = Clock()
    keys = (api_key("a", tokens_per_minute=PROMPT),)
    async with http_client(PretendReplica(), api_keys=keys, clock=clock) as client:
        answer = await client.post(path, json={**CHAT, "stream": stream}, headers=header("a"))
        assert answer.status_code == 200
        refused = await client.post(path, json=CHAT, headers=header("a"))
        assert refused.status_code == 429
        if path.startswith("/v1"):
            assert refused.json()["error"]["type"] == "tokens"
        assert (await client.get("/api/tags", headers=header("a"))).status_code == 200
        clock.now_s += int(refused.headers["retry-after"])
        assert await status(client, "a", path) == 200


def cost(prompt: int, completion: int) -> Usage:
    return Usage(prompt, 0, completion, 0, 0, 0)


async def charged(*deltas: ChatDelta, read: int | None = None, error: Exception | None = None):
    """The rest of a budget of 1000 after so many of these deltas, and the deltas read."""
    state = TenantLimits(Limits(tokens_per_minute=1000), Clock())
    left = []

    async def answer() -> AsyncGenerator[ChatDelta, None]:
        try:
            for delta in deltas:
                yield delta
            if error is not None:
                raise error
        finally:
            left.append(True)

    count = 0
    try:
        async with aclosing(metered(answer(), {"state": {"limits": state}})) as reported:
            async for _ in reported:
                count += 1
                if count == read:
                    break
    except GenerationFailedError:
        pass
    assert left, "leaving the answer ends it"
    assert state.tokens is not None
    return 1000 - state.tokens.level


FIRST = ChatDelta("a", (1,), usage=cost(100, 1))
SECOND = ChatDelta("b", (2, 3))
LAST = ChatDelta("", (4,), finish=FinishReason.STOP, usage=cost(100, 4))


async def test_an_answer_is_charged_its_prompt_and_its_tokens():
    assert await charged(FIRST, SECOND, LAST) == 104
    vectors = ChatDelta(finish=FinishReason.STOP, usage=cost(50, 0), vectors=(b"",))
    assert await charged(vectors) == 50


@pytest.mark.parametrize(("read", "tokens"), [(1, 101), (2, 103)])
async def test_an_answer_whose_client_disconnects_is_charged_the_tokens_so_far(read, tokens):
    assert await charged(FIRST, SECOND, LAST, read=read) == tokens


async def test_an_answer_that_fails_is_charged_the_tokens_so_far():
    assert await charged(FIRST, SECOND, error=GenerationFailedError("it broke")) == 103


async def test_concurrent_requests_of_a_key_are_limited():
    replica = PretendReplica()
    replica.waits.clear()
    keys = (api_key("a", concurrent_requests=2), api_key("b"))
    async with http_client(replica, api_keys=keys, clock=Clock()) as client:
        waiting = [asyncio.create_task(status(client, "a")) for _ in range(2)]
        await until(lambda: len(replica.tasks) == 2)
        refused = await client.get("/api/tags", headers=header("a"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await client.get("/healthz")).status_code == 200
        other = asyncio.create_task(status(client, "b"))
        replica.waits.set()
        assert [await task for task in (*waiting, other)] == [200, 200, 200]
        assert await status(client, "a") == 200


async def test_a_client_that_disconnects_frees_its_place():
    """Through ASGI itself, since httpx reads whole answers before it returns them."""
    replica = PretendReplica()
    replica.waits.clear()
    keys = (api_key("a", concurrent_requests=1),)
    async with ingress(replica, api_keys=keys, clock=Clock()) as app:
        begun, left = asyncio.Event(), asyncio.Event()

        async def ask(gone: asyncio.Event) -> int:
            body = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
            messages = [{"type": "http.request", "body": body, "more_body": False}]
            reported: list[int] = []

            async def receive():
                if messages:
                    return messages.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message) -> None:
                if message["type"] == "http.response.start":
                    reported.append(message["status"])
                elif message.get("body"):
                    begun.set()

            scope = {
                "type": "http",
                "http_version": "1.1",
                "method": "POST",
                "path": "/api/chat",
                "root_path": "",
                "query_string": b"",
                "headers": [(b"authorization", b"Bearer a"), (b"host", b"test")],
                "client": ("192.0.2.1", 1),
            }
            await app(scope, receive, send)
            return reported[0]

        streaming = asyncio.create_task(ask(left))
        await begun.wait()
        assert await ask(asyncio.Event()) == 429
        left.set()
        assert await streaming == 200
        replica.waits.set()
        assert await ask(asyncio.Event()) == 200


async def test_without_keys_each_address_has_a_limit_of_concurrent_requests():
    replica = PretendReplica()
    replica.waits.clear()
    async with http_client(replica, concurrent_requests=1) as client:
        waiting = asyncio.create_task(client.post("/api/chat", json=CHAT))
        await until(lambda: replica.tasks)
        refused = await client.post("/api/chat", json=CHAT)
        assert refused.status_code == 429
        assert "`concurrent_requests`" in refused.json()["error"]
        replica.waits.set()
        assert (await waiting).status_code == 200
        assert (await client.post("/api/chat", json=CHAT)).status_code == 200


async def test_several_processes_of_the_ingress_divide_the_limits():
    keys = (api_key("a", requests_per_minute=4),)
    async with http_client(PretendReplica(), api_keys=keys, processes=2, clock=Clock()) as client:
        assert [await status(client, "a") for _ in range(3)] == [200, 200, 429]


async def test_a_key_uses_and_lists_only_its_models():
    keys = (api_key("other", models=["else:*"]), api_key("mine", models=["dem*"]))
    async with http_client(PretendReplica(), api_keys=keys) as client:
        for key, names in (("other", []), ("mine", ["demo"])):
            listed = (await client.get("/v1/models", headers=header(key))).json()["data"]
            assert [model["id"] for model in listed] == names
            for path in ("/api/tags", "/api/ps"):
                reported = (await client.get(path, headers=header(key))).json()["models"]
                assert [model["name"] for model in reported] == [f"{name}:latest" for name in names]
            one = await client.get("/v1/models/demo", headers=header(key))
            assert one.status_code == (200 if names else 404)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/chat", {}),
        ("/api/generate", {"prompt": "hi"}),
        ("/api/embed", {"input": "hi"}),
        ("/api/embeddings", {"prompt": "hi"}),
        ("/api/show", {}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
async def test_a_model_that_a_key_may_not_use_does_not_exist_for_it(path, body):
    replica = PretendReplica()
    async with http_client(replica, api_keys=(api_key("a", models=["else"]),)) as client:
        reported = []
        for name in ("demo", "nobody"):
            answer = await client.post(path, json={**body, "model": name}, headers=header("a"))
            assert answer.status_code == 404
            reported.append(answer.text.replace(name, "NAME"))
        assert reported[0] == reported[1]
        assert ('"code":"model_not_found"' in reported[0]) == path.startswith("/v1")
    assert not replica.tasks
