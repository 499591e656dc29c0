"""The stream of images and features: what crosses it, and callers and encoders that misbehave."""

import asyncio
import struct
import threading
from dataclasses import replace

import msgspec
import pytest
import torch

from runtime.errors import GenerationFailedError, RequestError
from serve_app.transport import features, handshake, wire
from serve_app.transport.client import ConnectionLost
from serve_app.transport.feature_client import FeatureClient, LostAtWork
from serve_app.transport.line import MAX_MESSAGE_BYTES, PIECE_BYTES, PURPOSE, Line
from tests.patience import HANG_S, until
from tests.unit.runtime.vision import PretendTower, picture
from tests.unit.serve_app.encoding import CPU, NAME, encoder_of, rounded, served

LIMITS = PretendTower().limits


def client(**change) -> FeatureClient:
    return FeatureClient(LIMITS, **{"tower": NAME, "device": CPU, "patience_s": HANG_S, **change})


def ask(**change) -> features.EncodeRequest:
    given = {"tower": NAME, "digest": b"\1", "shape": (3,), "grid": (1, 3), "rows": 3}
    return features.EncodeRequest(**{**given, **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
async def test_features_arrive_as_the_replica_computes(dtype) -> None:
    limits = replace(LIMITS, dtype=dtype)
    asking = FeatureClient(limits, tower=NAME, device=CPU)
    async with served(encoder_of(PretendTower())) as (_, address):
        found = await asking.features(address, picture(5))
    assert found.dtype is limits.dtype
    assert torch.equal(found, rounded(picture(5)).to(dtype))
    asking.close()


async def test_pixels_are_brought_for_what_is_not_known_alone(monkeypatch) -> None:
    brought = []
    send = Line.send_bytes

    async def noted(line, memory):
        brought.append(len(memory))
        await send(line, memory)

    monkeypatch.setattr(Line, "send_bytes", noted)
    async with served(encoder_of(PretendTower())) as (_, address):
        for _ in range(3):
            assert torch.equal(await client().features(address, picture(5)), rounded(picture(5)))
    pixels, sent = 3 * 4, 3 * 16 * 2
    assert brought == [pixels, sent, sent, sent]


async def test_images_of_many_megabytes_arrive_whole() -> None:
    rows, width = 4096, 1024

    class Wide(PretendTower):
        def encode(self, pixels, grid):
            return pixels.view(1, rows, -1)[..., :1].expand(1, rows, width) + 0.0

    tower = Wide(rows=rows, width=width)
    pixels = torch.arange(rows * 1024, dtype=torch.float32).view(rows, -1)
    tower.largest = lambda: type(picture(1))(pixels, (1, rows), b"x", rows)
    asking = FeatureClient(tower.limits, tower=NAME, device=CPU)
    async with served(encoder_of(tower)) as (_, address):
        found = await asking.features(address, tower.largest())
    assert pixels.nbytes > 8 * PIECE_BYTES and found.nbytes > 8 * PIECE_BYTES
    expected = pixels[:, :1].to(torch.bfloat16).float().expand(rows, width)
    assert torch.equal(found, expected)
    asking.close()


async def test_errors_keep_their_type_and_the_connection_goes_on() -> None:
    async with served(encoder_of(PretendTower(broken=frozenset([3])))) as (server, address):
        asking = client()
        with pytest.raises(GenerationFailedError, match="upside down"):
            await asking.features(address, picture(3))
        assert torch.equal(await asking.features(address, picture(4)), rounded(picture(4)))
        assert len(server._callers) == 1
        asking.close()
        with pytest.raises(RequestError, match="same files"):
            await client(tower=b"another").features(address, picture(1))


async def test_a_caller_that_leaves_is_waited_for_no_longer() -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    async with served(encoder := encoder_of(tower)) as (_, address):
        first = asyncio.create_task(client().features(address, picture(1)))
        await until(lambda: tower.entered.acquire(blocking=False))
        second = asyncio.create_task(client().features(address, picture(2)))
        await until(lambda: encoder.statistics().images_waiting == 2)
        await asyncio.sleep(0.05)
        second.cancel()
        await until(lambda: encoder.statistics().images_waiting == 1)
        gate.release(100)
        assert torch.equal(await first, rounded(picture(1)))
        assert tower.encoded == [1]


async def test_who_waits_hears_that_the_encoder_lives(monkeypatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_S", 0.02)
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    async with served(encoder_of(tower)) as (_, address):
        asked = asyncio.create_task(client(patience_s=1.0).features(address, picture(1)))
        await asyncio.sleep(1.2)
        assert not asked.done()
        gate.release()
        assert torch.equal(await asked, rounded(picture(1)))


async def test_an_encoder_that_falls_silent_is_lost() -> None:
    async def silent(reader, writer):
        await reader.read()

    server = await asyncio.start_server(silent, "127.0.0.1")
    address = wire.Address("127.0.0.1", server.sockets[0].getsockname()[1], "token")
    with pytest.raises(ConnectionLost, match=r"moved for 0\.1 seconds"):
        await client(patience_s=0.1).features(address, picture(1))
    server.close()


async def test_closing_lets_a_running_answer_end_and_takes_no_more() -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    asking = client()
    async with served(encoder_of(tower)) as (server, address):
        asked = asyncio.create_task(asking.features(address, picture(1)))
        await until(lambda: tower.entered.acquire(blocking=False))
        closing = asyncio.create_task(server.close(drain_s=20))
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionLost):
            await client().features(address, picture(2))
        gate.release(100)
        assert torch.equal(await asked, rounded(picture(1)))
        await closing
        with pytest.raises(ConnectionLost):
            await asking.features(address, picture(3))


class Caller:
    """Speaks whatever the test wants."""

    @classmethod
    async def to(cls, address: wire.Address) -> "Caller":
        caller = cls()
        caller.reader, caller.writer = await asyncio.open_connection(address.host, address.port)
        send, _ = wire.greetings(caller.reader, caller.writer)
        await handshake.prove(send, caller.heard, token=address.token, purpose=PURPOSE)
        return caller

    def say(self, message: msgspec.Struct) -> None:
        self.writer.write(wire.frame(message))

    async def heard(self) -> features.Message:
        async with asyncio.timeout(HANG_S):
            (length,) = struct.unpack(">I", await self.reader.readexactly(4))
            return features.decode(await self.reader.readexactly(length))

    async def closed(self) -> bool:
        """Without another word."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:  # before all of ours was read
                return True


HOSTILE = {
    "no message": b"\0\0\0\4\xc1\xc1\xc1\xc1",
    "too long": (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
    "a length of four gigabytes": b"\xff\xff\xff\xff",
    "another kind": wire.frame(features.SendPixels()),
    "a task": wire.frame(wire.Heartbeat()),
    "no dimensions": wire.frame(ask(shape=())),
    "too many dimensions": wire.frame(ask(shape=(1,) * 9)),
    "a negative size": wire.frame(ask(shape=(-3,))),
    "nothing": wire.frame(ask(rows=0)),
    "a grid of three": wire.frame(ask(grid=(1, 1, 1))),
    "a long digest": wire.frame(ask(digest=bytes(65))),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_caller_that_speaks_nonsense_is_cut_off_and_others_are_served(name) -> None:
    async with served(encoder := encoder_of(PretendTower())) as (_, address):
        caller = await Caller.to(address)
        caller.writer.write(HOSTILE[name])
        assert await caller.closed()
        assert torch.equal(await client().features(address, picture(1)), rounded(picture(1)))
        assert encoder.statistics().images_waiting == 0


async def test_a_caller_that_brings_half_the_pixels_gives_its_place_to_the_next() -> None:
    async with served(encoder_of(PretendTower()), patience_s=1.0) as (_, address):
        for number, leaves in ((1, True), (2, False)):
            caller = await Caller.to(address)
            caller.say(ask(digest=bytes([number])))
            assert isinstance(await caller.heard(), features.SendPixels)
            caller.writer.write(b"\0\0\0\0")
            if leaves:
                caller.writer.close()
            found = await client().features(address, picture(number))
            assert torch.equal(found, rounded(picture(number)))


async def test_a_caller_that_speaks_out_of_turn_is_cut_off() -> None:
    gate = threading.Semaphore(0)
    async with served(encoder := encoder_of(PretendTower(gate=gate))) as (_, address):
        caller = await Caller.to(address)
        caller.say(ask())
        assert isinstance(await caller.heard(), features.SendPixels)
        caller.writer.write(struct.pack("<3f", 1, 1, 1) + b"more")
        assert await caller.closed()
        assert encoder.statistics().images_waiting == 0
        gate.release(100)


BAD_ANSWERS = {
    "rows of another number": features.Features(4, 16, "bfloat16"),
    "rows of another width": features.Features(3, 2**24, "bfloat16"),
    "no features": wire.Challenge(b"again" * 6 + b"ab"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
@pytest.mark.parametrize("asks_pixels", [True, False])
async def test_an_encoder_that_answers_nonsense_is_lost(name, asks_pixels) -> None:
    async def answer(reader, writer):
        send, receive = wire.greetings(reader, writer)
        await handshake.admit(send, receive, token="token", purpose=PURPOSE)
        await reader.readexactly(struct.unpack(">I", await reader.readexactly(4))[0])
        if asks_pixels:
            writer.write(wire.frame(features.SendPixels()))
            await reader.readexactly(12)
        writer.write(wire.frame(BAD_ANSWERS[name]))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    address = wire.Address("127.0.0.1", server.sockets[0].getsockname()[1], "token")
    with pytest.raises(ConnectionLost) as lost:
        await client().features(address, picture(1))
    assert isinstance(lost.value, LostAtWork) == asks_pixels
    server.close()
