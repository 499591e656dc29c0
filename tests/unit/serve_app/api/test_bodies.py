"""Bodies that are expensive to receive or read are refused before the work is done."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request

from model_zoo.chat.messages import Message
from runtime.errors import OverloadedError, RequestError
from serve_app.api import bodies, fields, ollama, ollama_management, openai_chat, openai_completions
from serve_app.api.bodies import (
    FREE_BYTES,
    MAX_STRUCTURES,
    MAX_VALUES,
    BodyLimits,
    BodyReceiver,
    JsonScan,
)
from serve_app.api.fields import INLINE_BYTES, INLINE_OBJECTS, MAX_ITEMS, token_ids
from serve_app.api.refusals import BodyTooLargeError, QuotaError, SlowBodyError
from serve_app.api.request_images import ImageRules
from tests.unit.serve_app.api.test_request_images import (
    ONE,
    OPENAI,
    SEEING,
    coded,
    data_uri,
    part,
    text,
)
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica, http_client
from tests.virtual_time import in_virtual_time

CHAT = "/v1/chat/completions"
TEXTS = st.text(alphabet='ab"\\,:[]{}\n😀', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


def counted(value: object) -> tuple[int, int]:
    """Brackets and commas, brackets and colons of a value's JSON text."""
    if not isinstance(value, list | dict):
        return 0, 0
    items = list(value.values() if isinstance(value, dict) else value)
    inner = [counted(item) for item in items]
    values = 1 + max(0, len(items) - 1) + sum(each[0] for each in inner)
    fields = len(items) if isinstance(value, dict) else 0
    return values, 1 + fields + sum(each[1] for each in inner)


@given(VALUES, st.booleans(), st.integers(1, 7))
def test_json_values_outside_strings_are_counted_in_parts_of_any_size(value, ascii, size):
    data, scan = json.dumps(value, ensure_ascii=ascii).encode(), JsonScan()
    for begin in range(0, len(data), size):
        scan.add(data[begin : begin + size])
    assert (scan.values, scan.structures) == counted(value)


BOMBS = [
    (CHAT, b'{"messages": [{"content": [' + b'{"type":"text","text":""},' * MAX_STRUCTURES),
    (CHAT, b'{"messages": [' + b"{}," * MAX_STRUCTURES),
    (CHAT, b"[" * (MAX_STRUCTURES + 1)),
    (CHAT, b"{" + b'"":0,' * MAX_STRUCTURES),
    ("/api/chat", b'{"messages": [{"images": [' + b'"",' * MAX_VALUES),
    ("/v1/completions", b'{"prompt": [' + b"1," * MAX_VALUES),
]


@pytest.mark.parametrize(("path", "content"), BOMBS)
async def test_too_many_values_are_refused_before_decoding(path, content, monkeypatch):
    monkeypatch.setattr(msgspec.json, "decode", None)
    async with http_client(PretendReplica(), max_body_bytes=2**23) as client:
        response = await client.post(path, content=content)
    assert response.status_code == 400
    assert "the request body has more than" in response.text


async def test_no_more_of_a_refused_body_is_read():
    sent = 0

    async def bomb() -> AsyncIterator[bytes]:
        nonlocal sent
        while (sent := sent + 1) < 1000:
            yield b"[" * 10_000

    async with http_client(PretendReplica(), max_body_bytes=2**25) as client:
        response = await client.post(CHAT, content=bomb())
    assert response.status_code == 400
    assert sent == MAX_STRUCTURES // 10_000 + 1


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (openai_chat.ChatCompletionBody, {"messages": [{}] * MAX_ITEMS}),
        (openai_chat.ChatCompletionBody, {"messages": [{"role": "user"}] * (MAX_ITEMS + 1)}),
        (ollama.ChatBody, {"messages": [{"role": "user", "images": [1] * MAX_ITEMS}] * 9}),
        (ollama.GenerateBody, {"context": ["x"] * MAX_VALUES}),
        (ollama_management.CreateBody, {"messages": [{}] * MAX_ITEMS}),
        (ollama_management.CreateBody, {"license": [1] * MAX_ITEMS}),
    ],
)
def test_only_the_first_of_many_errors_is_created(kind, raw):
    with pytest.raises(ValidationError) as error:
        kind.model_validate(raw)
    assert error.value.error_count() <= 2  # one for each type of a union


async def test_too_many_messages_are_refused_by_name():
    body = {"model": "demo", "messages": [{"role": "user"}] * (MAX_ITEMS + 1)}
    async with http_client(PretendReplica(), max_body_bytes=2**20) as client:
        response = await client.post(CHAT, json=body)
    assert response.status_code == 400
    assert f'field "messages" has more than {MAX_ITEMS:,} items' in response.text.replace("\\", "")


async def test_costly_bodies_are_parsed_in_one_thread_and_others_on_the_event_loop(monkeypatch):
    threads, decode = [], msgspec.json.decode

    def noting(data: bytearray) -> object:
        threads.append(threading.current_thread())
        return decode(data)

    monkeypatch.setattr(fields.msgspec.json, "decode", noting)
    large = {"model": "demo", "prompt": "x" * INLINE_BYTES}
    many = {"model": "demo", "messages": [{"role": "user"}] * (INLINE_OBJECTS + 1)}
    async with http_client(PretendReplica(), max_body_bytes=2**20) as client:
        await client.post("/v1/completions", json={"model": "demo", "prompt": "x"})
        await asyncio.gather(*[client.post("/v1/completions", json=large) for _ in range(3)])
        await client.post(CHAT, json=many)
    assert threads[0] is threading.main_thread()
    assert len(set(threads[1:])) == 1
    assert threads[1].name.startswith("bodies")


LIMITED = {"card": SEEING, "max_body_bytes": 2**20, "max_text_bytes": 4096}


async def test_text_beyond_its_limit_is_refused_and_an_image_is_not():
    image = part(data_uri(ONE + bytes(20_000)))
    async with http_client(PretendReplica(), **LIMITED) as client:
        for words, status in (("a" * 3500, 200), ("a" * 4096, 413)):
            message = {"role": "user", "content": [text(words), image]}
            response = await client.post(OPENAI, json={"model": "demo", "messages": [message]})
            assert response.status_code == status, response.text
    assert "4,096 bytes outside images (`max_text_bytes`)" in response.text


async def test_ollamas_images_do_not_count_as_text():
    image = coded(ONE + bytes(20_000))
    async with http_client(PretendReplica(), **LIMITED) as client:
        message = {"role": "user", "content": "a", "images": [image]}
        body = {"model": "demo", "messages": [message], "stream": False}
        assert (await client.post("/api/chat", json=body)).status_code == 200
        body = {"model": "demo", "prompt": "a", "images": [image], "stream": False}
        assert (await client.post("/api/generate", json=body)).status_code == 200


async def test_invalid_base64_is_refused_before_the_whole_body_is_received(monkeypatch):
    monkeypatch.setattr(msgspec.json, "decode", None)
    sent = 0

    async def words() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'{"messages": [{"role": "user", "content": "'
        while (sent := sent + 1) < 1000:
            yield b"some words " * 100

    async with http_client(PretendReplica(), **LIMITED) as client:
        response = await client.post(CHAT, content=words())
    assert response.status_code == 413
    assert sent == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/api/embed", "/api/show"])
async def test_requests_without_images_have_the_limit_of_text(path):
    async with http_client(PretendReplica(), **LIMITED) as client:
        response = await client.post(path, content=b"a" * 5000)
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/chat", {"role": "user", "images": [""] * 2000}),
        (CHAT, {"role": "user", "content": [part("data:")] * 2000}),
    ],
)
async def test_images_are_counted_before_they_are_read(path, message, monkeypatch):
    for module in (ollama, openai_chat):
        monkeypatch.setattr(module, "UnreadImage", None)
    monkeypatch.setattr(openai_chat, "from_url", None)
    options = {"card": SEEING, "image_rules": ImageRules(most=2), "max_body_bytes": 2**20}
    async with http_client(PretendReplica(), **options) as client:
        response = await client.post(path, json={"model": "demo", "messages": [message]})
    assert response.status_code == 400
    assert "the request has 2,000 images; at most 2 are accepted" in response.text


async def test_adjacent_text_parts_are_joined():
    replica = PretendReplica()
    body = {"model": "demo", "messages": [{"role": "user", "content": [text("a")] * 2000}]}
    async with http_client(replica, max_body_bytes=2**20) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert replica.tasks[0].prompt.messages == (Message("user", "\n\n".join("a" * 2000)),)


@pytest.mark.parametrize(
    ("values", "are"),
    [([0, 2**31 - 1], True), ([], False), ([True], False), ([-1], False), ([2**31], False),
     ([1, "a"], False), ([1.0], False)],
)  # fmt: skip
def test_token_ids_are_integers_of_31_bits(values, are):
    assert token_ids(values) == (tuple(values) if are else None)
    if not are:
        with pytest.raises(RequestError):
            openai_completions._prompts(openai_completions.CompletionBody(prompt=values))


class Sender:
    """A client that sends its body as `parts`, each after so many seconds of the loop's clock."""

    def __init__(self, *parts: tuple[float, bytes], tenant: str = "a") -> None:
        scope = {"type": "http", "headers": [], "state": {"tenant": tenant}}
        self.request = Request(scope, self._receive)
        self._parts = list(parts)

    async def _receive(self) -> dict[str, object]:
        after_s, part = self._parts.pop(0)
        await asyncio.sleep(after_s)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}


def receive(sender: Sender, **limits: int) -> tuple[int, float]:
    """The number of received bytes, and the seconds that it took."""

    async def all_of_it() -> tuple[int, float]:
        receiver = BodyReceiver(BodyLimits(2**25, **limits))
        async with receiver.received(sender.request, images=True) as body:
            return len(body), asyncio.get_running_loop().time()

    return in_virtual_time(all_of_it())


def test_a_stalled_body_times_out_after_the_configured_limit():
    with pytest.raises(SlowBodyError, match="after 1 bytes it was 30 s behind 65,536 bytes"):
        receive(Sender((0, b"{"), (1000, b"}")))
    assert receive(Sender((0, b"{"), (29, b"}"))) == (2, 29)


def test_a_slow_body_is_received_while_it_keeps_the_minimum_rate():
    parts = [(0.9, b" " * 2**16) for _ in range(100)]
    assert receive(Sender(*parts)) == (100 * 2**16, pytest.approx(90))
    with pytest.raises(SlowBodyError):
        receive(Sender(*[(2.0, b" " * 2**16) for _ in range(100)]))


def test_a_body_that_begins_fast_may_not_stall_for_longer():
    begun = [(0.0, b" " * 2**20)] * 7
    assert receive(Sender(*begun, (29.0, b" "), (0.5, b" "))) == (7 * 2**20 + 2, 29.5)
    with pytest.raises(SlowBodyError, match="after 7,340,032 bytes it was 30 s behind"):
        receive(Sender(*begun, (31.0, b" ")))


async def test_a_slow_body_is_answered_408_and_its_connection_closed():
    async def held_back() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with http_client(PretendReplica(), grace_s=0.01) as client:
        response = await client.post(CHAT, content=held_back())
    assert response.status_code == 408
    assert response.headers["connection"] == "close"


BIG = b" " * (FREE_BYTES + 1000)


async def test_a_tenant_has_a_share_of_the_budget_which_is_released_afterwards():
    receiver = BodyReceiver(BodyLimits(2**20, budget_bytes=2**20 * 4, max_text_bytes=2**30))
    body = b"a" * (2**19 + FREE_BYTES)
    async with AsyncExitStack() as opened:
        for _ in range(2):
            await opened.enter_async_context(receiver.received(Sender((0, body)).request, images=1))
        with pytest.raises(QuotaError, match="1,048,576 bytes of bodies in flight"):
            async with receiver.received(Sender((0, BIG)).request, images=True):
                pass
        small = Sender((0, b"a" * FREE_BYTES)).request
        await opened.enter_async_context(receiver.received(small, images=True))
        other = Sender((0, body), tenant="b").request
        await opened.enter_async_context(receiver.received(other, images=True))
        assert receiver.budget.held_bytes == 3 * 2**19
    assert receiver.budget.held_bytes == 0
    async with receiver.received(Sender((0, BIG)).request, images=True) as data:
        assert len(data) == len(BIG)


async def test_a_process_has_a_budget_for_all_tenants():
    receiver = BodyReceiver(BodyLimits(2**20, budget_bytes=2**20, max_text_bytes=2**30))
    first = Sender((0, b"a" * 2**20)).request
    async with receiver.received(first, images=True):
        with pytest.raises(OverloadedError):
            async with receiver.received(Sender((0, b"a" * 2**18), tenant="b").request, images=1):
                pass


async def test_the_budget_of_a_refused_body_is_released():
    receiver = BodyReceiver(BodyLimits(2**20))
    for broken in (b"[" * 2**18, b"a" * (2**20 + 1)):
        with pytest.raises(RequestError):
            async with receiver.received(Sender((0, BIG), (0, broken)).request, images=True):
                pass
        assert receiver.budget.held_bytes == 0


async def test_a_body_beyond_the_free_budget_is_refused_by_its_content_length():
    receiver = BodyReceiver(BodyLimits(2**20, budget_bytes=2**20))
    large = Sender((0, b""))
    large.request.scope["headers"].append((b"content-length", b"1000000"))
    async with receiver.received(Sender((0, b"a" * 2**19)).request, images=True):
        with pytest.raises(QuotaError):
            async with receiver.received(large.request, images=True):
                raise AssertionError("nothing of it was sent")


async def test_a_tenant_that_sends_too_much_is_answered_429(monkeypatch):
    monkeypatch.setattr(bodies, "FREE_BYTES", 0)
    limits = {"max_body_bytes": 2000, "budget_bytes": 2000}
    waiting = asyncio.Event()

    async def unfinished() -> AsyncIterator[bytes]:
        yield b"{" + b" " * 1500
        waiting.set()
        await asyncio.Event().wait()

    async with http_client(PretendReplica(), card=CARD, **limits) as client:
        first = asyncio.create_task(client.post(CHAT, content=unfinished()))
        await waiting.wait()
        response = await client.post(CHAT, content=b"{" + b" " * 1000)
        first.cancel()
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    with pytest.raises(asyncio.CancelledError):
        await first


def test_the_largest_allowed_body_fits_the_share_of_a_tenant():
    limits = BodyLimits(2**25, budget_bytes=2**20)
    assert limits.tenant_bytes == 2**25
    with pytest.raises(BodyTooLargeError):
        limits.check_text(2**24)
