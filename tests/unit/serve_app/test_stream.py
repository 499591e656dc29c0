"""The direct stream: answers, merging, leaving, refusals, and callers who do not belong."""

import asyncio
import dataclasses
import tracemalloc
from collections.abc import Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from model_zoo.chat.messages import Message
from runtime.engine.request import FinishReason, SamplingParams
from runtime.errors import OverloadedError, PromptTooLongError
from serve_app.gateway.tasks import ChatDelta, ChatTask, Conversation, RawText, TokenIds, merge
from serve_app.transport import wire
from serve_app.transport.client import ConnectionLost, StreamClient, _Connection
from serve_app.transport.server import StreamServer
from tests.patience import HANG_S, until
from tests.unit.serve_app.pretend import USAGE, PretendReplica

TASK = ChatTask("t1", "demo", RawText("hi"), SamplingParams(), stop=("x",))


@asynccontextmanager
async def connected(replica: PretendReplica):
    server = StreamServer(replica.generate)
    address = await server.start("127.0.0.1")
    client = StreamClient()
    try:
        yield server, address, client
    finally:
        client.close()
        await server.close(drain_s=1.0)


async def collected(client: StreamClient, address: wire.Address, task=TASK) -> list[ChatDelta]:
    async with asyncio.timeout(HANG_S), aclosing(client.generate(address, task)) as deltas:
        return [delta async for delta in deltas]


@pytest.mark.parametrize(
    "prompt",
    [
        Conversation((Message("system", "be"), Message("user", "naïve 🐪")), thinking=False),
        Conversation((Message("user", "hi"),), variables={"a": {"b": [1, None, 2**62, "🐪", 0.5]}}),
        RawText("text"),
        TokenIds((1, 2, 3)),
    ],
)
async def test_a_task_arrives_as_it_was_sent(prompt):
    replica = PretendReplica()
    task = dataclasses.replace(TASK, prompt=prompt, max_tokens=5)
    async with connected(replica) as (_, address, client):
        await collected(client, address, task)
    assert replica.tasks == [task]


async def test_deltas_arrive_in_order_and_end_with_the_finish():
    async with connected(PretendReplica(("a", "b", "c"))) as (_, address, client):
        whole = merge(await collected(client, address))
    assert whole == ChatDelta("abc", (0, 1, 2, 99), finish=FinishReason.STOP, usage=USAGE)


async def test_deltas_that_nobody_read_yet_come_as_one():
    async with (
        connected(PretendReplica(tuple("abcdefgh"))) as (_, address, client),
        aclosing(client.generate(address, TASK)) as deltas,
    ):
        first = await anext(deltas)
        await asyncio.sleep(0.2)
        rest = [delta async for delta in deltas]
    assert len(rest) <= 1
    assert merge([first, *rest]).text == "abcdefgh"


async def test_one_connection_serves_one_task_after_another():
    replica = PretendReplica()
    async with connected(replica) as (server, address, client):
        for _ in range(3):
            await collected(client, address)
        assert len(server._connections) == 1
    assert len(replica.tasks) == 3


async def test_leaving_ends_the_task_on_the_replica():
    replica = PretendReplica()
    replica.waits.clear()
    async with connected(replica) as (_, address, client):
        async with aclosing(client.generate(address, TASK)) as deltas:
            await anext(deltas)
        await until(lambda: replica.left)


@pytest.mark.parametrize("error", [PromptTooLongError("too long"), OverloadedError("full")])
async def test_errors_keep_their_type_and_their_words(error):
    replica = PretendReplica()
    replica.error = error
    async with connected(replica) as (server, address, client):
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                await collected(client, address)
        replica.error = None
        assert merge(await collected(client, address)).text == "Hello, world"
        assert len(server._connections) == 1


async def test_a_wrong_token_gets_no_answer():
    replica = PretendReplica()
    async with connected(replica) as (_, address, client):
        with pytest.raises(ConnectionLost):
            await collected(client, dataclasses.replace(address, token="guess"))
    assert replica.tasks == []


async def test_a_task_without_proof_gets_no_answer():
    replica = PretendReplica()
    async with connected(replica) as (_, address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(wire.frame(wire.GenerateRequest(TASK)))
        async with asyncio.timeout(HANG_S):
            await wire.read_message(reader, 1024)  # the challenge
            assert await reader.read() == b""
        writer.close()
    assert replica.tasks == []


async def test_a_frame_beyond_the_limit_closes_the_connection_unread():
    async with connected(PretendReplica()) as (_, address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write((2**31).to_bytes(4, "big"))
        async with asyncio.timeout(HANG_S):
            await wire.read_message(reader, 1024)
            assert await reader.read() == b""
        writer.close()


async def test_nobody_listening_is_a_lost_connection():
    async with connected(PretendReplica()) as (server, address, client):
        await server.close(drain_s=0)
        with pytest.raises(ConnectionLost):
            await collected(client, address)


async def test_closing_lets_a_running_answer_end():
    replica = PretendReplica()
    replica.waits.clear()
    async with connected(replica) as (server, address, client):
        answer = asyncio.create_task(collected(client, address))
        await until(lambda: replica.tasks)
        closing = asyncio.create_task(server.close(drain_s=5.0))
        await asyncio.sleep(0.05)
        replica.waits.set()
        assert merge(await answer).text == "Hello, world"
        await closing


def test_frames_cut_anywhere_come_out_whole():
    messages = [wire.DeltaMessage(ChatDelta("é" * n, (n,))) for n in range(5)]
    data = b"".join(map(wire.frame, messages))
    splitter = wire.FrameSplitter(1024)
    out = [message for byte in data for message in splitter.feed(bytes([byte]))]
    assert out == messages


def test_a_frame_with_rubbish_is_refused():
    with pytest.raises(wire.WireError):
        wire.decode(b"\xc1rubbish")


PENDING_BYTES = 4 * 2**20


def allocated_by(work: Callable[[], object]) -> int:
    """Bytes at the most beyond those that were allocated before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_the_check_of_an_incomplete_frame_copies_nothing_of_it() -> None:
    splitter = wire.FrameSplitter(2 * PENDING_BYTES)
    splitter.feed(wire.LENGTH.pack(2 * PENDING_BYTES) + bytes(PENDING_BYTES))
    splitter.feed(b"x")  # the buffer now has room for more
    assert allocated_by(lambda: splitter.feed(b"x")) < 64 * 1024


def test_the_frames_of_one_read_do_not_copy_what_follows_them() -> None:
    splitter = wire.FrameSplitter(2 * PENDING_BYTES)
    beats = wire.frame(wire.Heartbeat()) * 100
    data = beats + wire.LENGTH.pack(2 * PENDING_BYTES) + bytes(PENDING_BYTES)
    assert allocated_by(lambda: splitter.feed(data)) < 1.5 * PENDING_BYTES


def test_a_whole_frame_is_decoded_where_it_lies() -> None:
    message = wire.DeltaMessage(ChatDelta("x" * PENDING_BYTES))
    splitter = wire.FrameSplitter(2 * PENDING_BYTES)
    data = wire.frame(message)
    assert allocated_by(lambda: splitter.feed(data)) < 2.5 * PENDING_BYTES  # buffer and text
    assert splitter.feed(data) == [message]


async def test_deltas_that_nobody_reads_are_merged_once(monkeypatch) -> None:
    merged = 0

    def counting(deltas: list[ChatDelta]) -> ChatDelta:
        nonlocal merged
        merged += sum(len(delta.tokens) for delta in deltas)
        return merge(deltas)

    for module in ("serve_app.gateway.tasks", "serve_app.transport.client"):
        monkeypatch.setattr(f"{module}.merge", counting, raising=False)
    connection = _Connection()
    for token in range(500):
        connection._take(wire.DeltaMessage(ChatDelta("x", (token,))))
    told = await connection.receive()
    assert isinstance(told, ChatDelta) and told.tokens == tuple(range(500))
    assert merged == 500


@pytest.mark.parametrize("data", [b"\0\0\0\1\xc1", b"\0\0\1\0" + bytes(9), b"\xff\xff\xff\xff"])
def test_a_frame_that_is_malformed_or_too_long_is_refused_as_soon_as_that_shows(data) -> None:
    with pytest.raises(wire.WireError):
        wire.FrameSplitter(255).feed(data)
