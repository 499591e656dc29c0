"""Generation over a connection: deltas, merging, aborts, errors, unauthenticated callers."""

import asyncio
import dataclasses
import tracemalloc
from collections.abc import Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from model_zoo.chat.messages import Message
from runtime.engine.request import FinishReason, SamplingParams
from runtime.errors import InvalidImageError, OverloadedError, PromptTooLongError, RequestError
from serve_app.messages.tasks import (
    ChatDelta,
    ChatTask,
    Conversation,
    Infill,
    RawText,
    TokenIds,
    Truncation,
    merge,
)
from serve_app.transport import authentication, wire
from serve_app.transport.client import StreamClient
from serve_app.transport.connection import (
    BUFFER_BYTES,
    MAX_UNREAD_BYTES,
    PIECE_BYTES,
    FramedConnection,
)
from serve_app.transport.generation import generation_server
from serve_app.transport.wire import ConnectionLost
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.fake_replicas import USAGE, PretendReplica
from tests.unit.serve_app.transport.peer import Peer, peers

TASK = ChatTask("t1", "demo", RawText("hi"), SamplingParams(), stop=("x",))


@asynccontextmanager
async def connected(replica: PretendReplica):
    server = generation_server(replica.generate)
    address = await server.start("127.0.0.1")
    client = StreamClient()
    try:
        yield server, address, client
    finally:
        client.close()
        await server.close(drain_s=1.0)


async def collected(client: StreamClient, address: wire.Address, task=TASK) -> list[ChatDelta]:
    async with asyncio.timeout(HANG_S), aclosing(client.generate(address, task)) as parts:
        return [part async for part in parts if isinstance(part, ChatDelta)]


@pytest.mark.parametrize(
    "prompt",
    [
        Conversation((Message("system", "be"), Message("user", "naïve 🐪")), thinking=False),
        Conversation((Message("user", "hi"),), variables={"a": {"b": [1, None, 2**62, "🐪", 0.5]}}),
        RawText("text"),
        TokenIds((1, 2, 3)),
        Infill("before", "after", "template"),
    ],
)
async def test_a_task_is_received_as_it_was_sent(prompt):
    replica = PretendReplica()
    truncation = Truncation(keep=-1)
    task = dataclasses.replace(TASK, prompt=prompt, max_tokens=5, truncation=truncation)
    async with connected(replica) as (_, address, client):
        await collected(client, address, task)
    assert replica.tasks == [task]


async def test_deltas_arrive_in_order_and_end_with_the_finish():
    async with connected(PretendReplica(("a", "b", "c"))) as (_, address, client):
        whole = merge(await collected(client, address))
    assert whole == ChatDelta("abc", (0, 1, 2, 99), finish=FinishReason.STOP, usage=USAGE)


async def test_a_delta_that_is_too_large_fails_the_request_and_not_the_connection():
    """An echoed prompt with log-probabilities can be that large on every replica."""
    large = PretendReplica(("a" * wire.MAX_REPLY_BYTES,))
    async with connected(large) as (_, address, client):
        with pytest.raises(RequestError, match="at most 67,108,864 can be sent"):
            await collected(client, address)


async def test_unread_deltas_are_received_as_one():
    async with (
        connected(PretendReplica(tuple("abcdefgh"))) as (_, address, client),
        aclosing(client.generate(address, TASK)) as deltas,
    ):
        first = await anext(deltas)
        await settled()
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


async def test_a_client_that_leaves_aborts_its_task():
    replica = PretendReplica()
    replica.waits.clear()
    async with connected(replica) as (_, address, client):
        async with aclosing(client.generate(address, TASK)) as deltas:
            await anext(deltas)
        await until(lambda: replica.left)


@pytest.mark.parametrize("error", [PromptTooLongError("too long"), OverloadedError("full")])
async def test_errors_keep_their_type_and_their_text(error):
    replica = PretendReplica()
    replica.error = error
    async with connected(replica) as (server, address, client):
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                await collected(client, address)
        replica.error = None
        assert merge(await collected(client, address)).text == "Hello, world"
        assert len(server._connections) == 1


async def test_an_error_about_an_image_keeps_its_field():
    replica = PretendReplica()
    replica.error = InvalidImageError("messages[0].image", "it is damaged")
    async with connected(replica) as (_, address, client):
        with pytest.raises(InvalidImageError, match="it is damaged") as raised:
            await collected(client, address)
    assert raised.value.field == "messages[0].image"


async def test_a_frame_beyond_the_limit_closes_the_connection():
    async with connected(PretendReplica()) as (_, address, _):
        peer = await Peer.to(address)
        peer.writer.write((2**31).to_bytes(4, "big"))
        assert isinstance(await peer.receive(), wire.Challenge)
        assert await peer.closed()


async def test_a_request_that_is_sent_ahead_is_answered_next():
    replica = PretendReplica()
    replica.waits.clear()
    async with connected(replica) as (_, address, _):
        peer = await Peer.authenticated(address)
        peer.send(wire.GenerateRequest(TASK))
        peer.send(wire.GenerateRequest(TASK))
        await until(lambda: replica.tasks)
        replica.waits.set()
        finished = 0
        while finished < 2:
            message = await peer.receive()
            finished += isinstance(message, wire.DeltaMessage) and message.delta.finish is not None
        peer.writer.close()
    assert len(replica.tasks) == 2


async def test_draining_is_announced_at_once_and_idle_connections_are_not_used_again():
    replica = PretendReplica()
    replica.waits.clear()
    async with connected(replica) as (server, address, client):
        server._heartbeat_s = HANG_S
        async with aclosing(client.generate(address, TASK)) as parts:
            assert isinstance(await anext(parts), ChatDelta)
            closing = asyncio.create_task(server.close(drain_s=HANG_S))
            assert isinstance(await anext(parts), wire.Draining)
            replica.waits.set()
            rest = [part async for part in parts]
        assert merge([part for part in rest if isinstance(part, ChatDelta)]).finish
        await closing
        assert not client._idle.get(address)


async def test_a_closed_port_is_a_lost_connection():
    """Also if the server is closed before it has waited for a connection."""
    async with connected(PretendReplica()) as (server, address, client):
        await server.close(drain_s=0)
        with pytest.raises(ConnectionLost, match="Connect call failed"):
            await collected(client, address)


async def test_closing_lets_a_running_answer_end():
    replica = PretendReplica()
    replica.waits.clear()
    async with connected(replica) as (server, address, client):
        answer = asyncio.create_task(collected(client, address))
        await until(lambda: replica.tasks)
        closing = asyncio.create_task(server.close(drain_s=5.0))
        await until(lambda: server._closing)
        replica.waits.set()
        assert merge(await answer).text == "Hello, world"
        await closing


LONG_TASK = dataclasses.replace(TASK, prompt=RawText("x" * 48 * 2**20))


async def test_a_request_that_takes_longer_than_the_silence_limit_to_send_is_answered():
    async def slow(peer: Peer) -> None:
        await authentication.admit(peer, "token")
        left = len(wire.frame(wire.request_of(LONG_TASK)))
        while left:
            left -= len(await peer.reader.readexactly(min(left, PIECE_BYTES)))
            # The rest is in buffers of the kernel, where the caller cannot see it move.
            await asyncio.sleep(0.03 if left > 16 * 2**20 else 0)
        peer.send(wire.DeltaMessage(ChatDelta("read", finish=FinishReason.STOP)))
        await peer.reader.read()

    client = StreamClient(silence_s=0.3)
    async with peers(slow) as address:
        assert merge(await collected(client, address, LONG_TASK)).text == "read"
        client.close()


async def test_a_replica_without_the_whole_request_is_not_at_work():
    async def leaves(peer: Peer) -> None:
        await authentication.admit(peer, "token")
        await peer.reader.readexactly(PIECE_BYTES)
        peer.writer.transport.abort()

    async with peers(leaves) as address:
        with pytest.raises(ConnectionLost) as lost:
            await collected(StreamClient(), address, LONG_TASK)
    assert not lost.value.at_work


LONG_WORDS = ("x" * 2**20,) * 32


async def test_a_reader_that_is_far_behind_loses_its_connection_and_then_its_messages():
    """Meanwhile the replica stops. Its loss is not one that the request may have caused."""
    replica = PretendReplica(LONG_WORDS)
    async with (
        connected(replica) as (_, address, client),
        aclosing(client.generate(address, TASK)) as deltas,
    ):
        parts = [await anext(deltas)]
        await until(lambda: replica.left)
        with pytest.raises(ConnectionLost, match="not read in time") as lost:
            async for part in deltas:
                parts.append(part)
    assert not lost.value.at_work
    text = merge([part for part in parts if isinstance(part, ChatDelta)]).text
    assert MAX_UNREAD_BYTES < len(text) < len("".join(LONG_WORDS))


async def test_a_message_may_be_longer_than_what_a_reader_leaves_unread():
    words = ("x" * 3 * MAX_UNREAD_BYTES, "y")
    async with connected(PretendReplica(words)) as (_, address, client):
        assert merge(await collected(client, address)).text == "".join(words)


def received(connection: FramedConnection, data: bytes) -> None:
    """What the event loop does with incoming bytes."""
    while data:
        room = connection.get_buffer(-1)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


def opened(limit_bytes: int) -> FramedConnection:
    connection = FramedConnection()
    connection.max_frame_bytes = limit_bytes
    return connection


async def test_frames_that_arrive_byte_by_byte_are_complete():
    messages = [wire.DeltaMessage(ChatDelta("é" * n, (n,))) for n in range(5)]
    data = b"".join(map(wire.frame, messages))
    connection = opened(1024)
    for byte in data:
        received(connection, bytes([byte]))
    assert await connection.receive_all() == messages


async def test_bytes_after_a_message_are_received_into_memory():
    connection = opened(1024)
    first, second = bytes(range(100)), bytes(range(100, 200))
    received(connection, wire.frame(wire.Features(1, 100, "bfloat16")) + first)
    assert isinstance(await connection.receive(), wire.Features)
    memory = bytearray(200)
    receiving = asyncio.create_task(connection.receive_into(memoryview(memory)))
    await asyncio.sleep(0)
    received(connection, second + wire.frame(wire.Heartbeat()))
    await receiving
    assert memory == first + second
    assert await connection.receive() == wire.Heartbeat()


def test_a_malformed_frame_is_refused():
    with pytest.raises(wire.WireError):
        wire.decode(b"\xc1rubbish")


PENDING_BYTES = 4 * 2**20


def allocated_by(work: Callable[[], object]) -> int:
    """The maximum of bytes beyond those that were allocated before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_checking_an_incomplete_frame_copies_nothing() -> None:
    connection = opened(2 * PENDING_BYTES)
    received(connection, wire.LENGTH.pack(2 * PENDING_BYTES) + bytes(PENDING_BYTES))
    assert allocated_by(connection._next_message) < 64 * 1024


def test_frames_that_arrive_together_do_not_copy_what_follows_them() -> None:
    connection = opened(2 * PENDING_BYTES)
    data = wire.frame(wire.Heartbeat()) * 100
    data += wire.LENGTH.pack(2 * PENDING_BYTES) + bytes(PENDING_BYTES)
    received(connection, data)

    def take() -> None:
        for _ in range(100):
            assert connection._next_message() == wire.Heartbeat()
        assert connection._next_message() is None

    assert allocated_by(take) < 64 * 1024


def test_a_long_frame_is_decoded_in_place_and_its_buffer_is_released() -> None:
    message = wire.DeltaMessage(ChatDelta("x" * PENDING_BYTES))
    connection = opened(2 * PENDING_BYTES)
    received(connection, wire.frame(message))
    taken: list[object] = []
    assert allocated_by(lambda: taken.append(connection._next_message())) < 1.5 * PENDING_BYTES
    assert taken == [message]
    assert len(connection._buffer) == BUFFER_BYTES


async def test_unread_deltas_are_merged_once(monkeypatch) -> None:
    merged = 0

    def counting(deltas: list[ChatDelta]) -> ChatDelta:
        nonlocal merged
        merged += sum(len(delta.tokens) for delta in deltas)
        return merge(deltas)

    monkeypatch.setattr("serve_app.transport.client.merge", counting)
    words = tuple("x" * 500)
    async with (
        connected(PretendReplica(words)) as (_, address, client),
        aclosing(client.generate(address, TASK)) as deltas,
    ):
        first = await anext(deltas)
        await settled()
        whole = merge([first] + [delta async for delta in deltas])
    assert whole.tokens == (*range(500), 99)
    assert merged == 501


@pytest.mark.parametrize("data", [b"\0\0\0\1\xc1", b"\0\0\1\0" + bytes(9), b"\xff\xff\xff\xff"])
async def test_a_malformed_or_too_long_frame_is_refused_before_it_is_complete(data) -> None:
    connection = opened(255)
    received(connection, data)
    with pytest.raises(wire.WireError):
        await connection.receive()
