"""Transfer of images and features, and callers and encoders that break the protocol."""

import asyncio
import json
import struct
import threading
from dataclasses import replace

import pytest
import torch

from runtime.engine.request import RequestOrigin
from runtime.errors import GenerationFailedError, RequestError
from runtime.vision.encoder import ImageOutline
from serve_app.logs import LEVEL, get_logger
from serve_app.transport import authentication, wire
from serve_app.transport.connection import PIECE_BYTES, FramedConnection
from serve_app.transport.wire import ConnectionLost
from serve_app.vision import feature_transfer
from serve_app.vision.feature_transfer import FeatureClient, feature_server
from tests.patience import HANG_S, settled, until
from tests.unit.runtime.vision.fake_tower import PretendTower, picture
from tests.unit.serve_app.transport.peer import Peer, peers
from tests.unit.serve_app.vision.served_encoders import CPU, NAME, encoder_of, rounded, served

LIMITS = PretendTower().limits


def client(**change) -> FeatureClient:
    return FeatureClient(LIMITS, **{"tower": NAME, "device": CPU, "silence_s": HANG_S, **change})


def request(**change) -> wire.EncodeRequest:
    given = {"tower": NAME, "digest": b"\1", "shape": (3,), "grid": (1, 3), "rows": 3}
    return wire.EncodeRequest(**{**given, **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
async def test_features_are_received_in_the_type_of_the_model(dtype) -> None:
    limits = replace(LIMITS, dtype=dtype)
    receiver = FeatureClient(limits, tower=NAME, device=CPU)
    async with served(encoder_of(PretendTower())) as (_, address):
        found = await receiver.features(address, picture(5))
    assert found.dtype is limits.dtype
    assert torch.equal(found, rounded(picture(5)).to(dtype))
    receiver.close()


async def test_pixels_are_sent_only_if_the_encoder_needs_them(monkeypatch) -> None:
    sent = []
    send = FramedConnection.send_bytes

    async def noted(connection, memory):
        sent.append(len(memory))
        await send(connection, memory)

    monkeypatch.setattr(FramedConnection, "send_bytes", noted)
    async with served(encoder_of(PretendTower())) as (_, address):
        for _ in range(3):
            assert torch.equal(await client().features(address, picture(5)), rounded(picture(5)))
    pixels, features = 3 * 4, 3 * 16 * 2
    assert sent == [pixels, features, features, features]


async def test_the_encoder_logs_the_request_that_an_image_is_from(monkeypatch, capsys) -> None:
    monkeypatch.setattr(feature_transfer, "log", get_logger({LEVEL: "debug"}))
    image = replace(picture(5), origin=RequestOrigin("one"))
    async with served(encoder_of(PretendTower())) as (_, address):
        await client().features(address, image)
        await client().features(address, picture(6))
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["event"], first["request"]) == ("image encoded", "one")
    assert "request" not in second


class WideTower(PretendTower):
    """Takes and returns images of 16 and 8 MiB."""

    def __init__(self, rows: int = 4096, width: int = 1024) -> None:
        super().__init__(rows=rows, width=width)
        largest = ImageOutline((rows, width), (1, rows), rows)
        self.limits = replace(self.limits, largest=largest)
        self.pixels = torch.arange(rows * width, dtype=torch.float32).view(rows, width)

    @property
    def image(self):
        rows = len(self.pixels)
        return type(picture(1))(self.pixels, (1, rows), b"x", rows)

    def encode(self, pixels, grid, pause):
        return pixels.view(1, *self.pixels.shape)[..., :1].expand(1, *self.pixels.shape) + 0.0


async def test_images_of_many_megabytes_arrive_complete() -> None:
    tower = WideTower()
    receiver = FeatureClient(tower.limits, tower=NAME, device=CPU)
    async with served(encoder_of(tower)) as (_, address):
        found = await receiver.features(address, tower.image)
    assert tower.pixels.nbytes > 8 * PIECE_BYTES and found.nbytes > 7 * PIECE_BYTES
    expected = tower.pixels[:, :1].to(torch.bfloat16).float().expand(tower.pixels.shape)
    assert torch.equal(found, expected)
    receiver.close()


async def test_more_features_than_are_received_at_once_arrive_complete() -> None:
    """The others stay with the encoder, whose heartbeats do not get between their bytes."""
    tower = WideTower()
    encoder = encoder_of(tower)
    server = feature_server(encoder, stall_s=HANG_S)
    server._heartbeat_s = 0.001
    address = await server.start("127.0.0.1")
    receiver = FeatureClient(tower.limits, tower=NAME, device=CPU, silence_s=HANG_S)
    images = [replace(tower.image, digest=bytes([number])) for number in range(6)]
    async with asyncio.timeout(HANG_S):
        found = await asyncio.gather(*(receiver.features(address, image) for image in images))
    expected = tower.pixels[:, :1].to(torch.bfloat16).float().expand(tower.pixels.shape)
    assert all(torch.equal(each, expected) for each in found)
    receiver.close()
    await server.close(drain_s=0)
    await asyncio.to_thread(encoder.close)


async def test_errors_keep_their_type_and_the_connection_is_used_again() -> None:
    async with served(encoder_of(PretendTower(broken=frozenset([3])))) as (server, address):
        receiver = client()
        with pytest.raises(GenerationFailedError, match="upside down"):
            await receiver.features(address, picture(3))
        assert torch.equal(await receiver.features(address, picture(4)), rounded(picture(4)))
        assert len(server._connections) == 1
        receiver.close()
        with pytest.raises(RequestError, match="same files"):
            await client(tower=b"another").features(address, picture(1))


async def test_an_image_whose_caller_leaves_is_not_encoded() -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    async with served(encoder := encoder_of(tower)) as (_, address):
        first = asyncio.create_task(client().features(address, picture(1)))
        await until(lambda: tower.entered.acquire(blocking=False))
        second = asyncio.create_task(client().features(address, picture(2)))
        await until(lambda: encoder.statistics().images_waiting == 2)
        await settled()
        second.cancel()
        await until(lambda: encoder.statistics().images_waiting == 1)
        gate.release(100)
        assert torch.equal(await first, rounded(picture(1)))
        assert tower.encoded == [1]


async def test_heartbeats_keep_a_waiting_caller_connected(heartbeats) -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    async with served(encoder_of(tower)) as (server, address):
        server._heartbeat_s = 0.02
        encoding = asyncio.create_task(client(silence_s=0.2).features(address, picture(1)))
        await until(lambda: len(heartbeats) > 15)
        assert not encoding.done()
        gate.release()
        assert torch.equal(await encoding, rounded(picture(1)))


async def test_a_silent_encoder_is_lost() -> None:
    async def silent(peer: Peer) -> None:
        await authentication.admit(peer, "token")
        await peer.reader.read()

    async with peers(silent) as address:
        with pytest.raises(ConnectionLost, match=r"silent for 0\.1 seconds") as lost:
            await client(silence_s=0.1).features(address, picture(1))
        assert not lost.value.at_work


async def test_closing_lets_a_running_request_end_and_refuses_others() -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    receiver = client()
    async with served(encoder_of(tower)) as (server, address):
        encoding = asyncio.create_task(receiver.features(address, picture(1)))
        await until(lambda: tower.entered.acquire(blocking=False))
        closing = asyncio.create_task(server.close(drain_s=20))
        await settled()
        with pytest.raises(ConnectionLost):
            await client().features(address, picture(2))
        gate.release(100)
        assert torch.equal(await encoding, rounded(picture(1)))
        await closing
        with pytest.raises(ConnectionLost):
            await receiver.features(address, picture(3))


HOSTILE = {
    "no message": b"\0\0\0\4\xc1\xc1\xc1\xc1",
    "too long": (wire.MAX_ENCODE_REQUEST_BYTES + 1).to_bytes(4, "big"),
    "a length of four gigabytes": b"\xff\xff\xff\xff",
    "a reply": wire.frame(wire.SendPixels()),
    "a request of another kind": wire.frame(wire.Watch(1.0)),
    "no dimensions": wire.frame(request(shape=())),
    "too many dimensions": wire.frame(request(shape=(1,) * 9)),
    "a negative size": wire.frame(request(shape=(-3,))),
    "no rows": wire.frame(request(rows=0)),
    "a grid of three": wire.frame(request(grid=(1, 1, 1))),
    "a long digest": wire.frame(request(digest=bytes(65))),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_caller_that_sends_nonsense_is_disconnected_and_others_are_served(name) -> None:
    async with served(encoder := encoder_of(PretendTower())) as (_, address):
        peer = await Peer.authenticated(address)
        peer.writer.write(HOSTILE[name])
        assert await peer.closed()
        assert torch.equal(await client().features(address, picture(1)), rounded(picture(1)))
        assert encoder.statistics().images_waiting == 0


async def test_a_caller_that_sends_half_the_pixels_makes_room_for_the_next() -> None:
    async with served(encoder_of(PretendTower()), stall_s=0.4) as (_, address):
        for number, leaves in ((1, True), (2, False)):
            peer = await Peer.authenticated(address)
            peer.send(request(digest=bytes([number])))
            assert isinstance(await peer.receive(), wire.SendPixels)
            peer.writer.write(b"\0\0\0\0")
            if leaves:
                peer.writer.close()
            found = await client().features(address, picture(number))
            assert torch.equal(found, rounded(picture(number)))


async def test_a_caller_that_sends_more_than_one_request_ahead_is_disconnected() -> None:
    gate = threading.Semaphore(0)
    async with served(encoder := encoder_of(PretendTower(gate=gate))) as (_, address):
        peer = await Peer.authenticated(address)
        peer.send(request())
        assert isinstance(await peer.receive(), wire.SendPixels)
        peer.writer.write(struct.pack("<3f", 1, 1, 1) + bytes(2 * wire.MAX_ENCODE_REQUEST_BYTES))
        assert await peer.closed()
        await until(lambda: encoder.statistics().images_waiting == 0)
        gate.release(100)


BAD_REPLIES = {
    "rows of another number": wire.Features(4, 16, "bfloat16"),
    "rows of another width": wire.Features(3, 2**24, "bfloat16"),
    "no features": wire.Challenge(bytes(32)),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
@pytest.mark.parametrize("needs_pixels", [True, False])
async def test_an_encoder_that_replies_with_nonsense_is_lost(name, needs_pixels) -> None:
    async def reply(peer: Peer) -> None:
        await authentication.admit(peer, "token")
        await peer.receive()
        if needs_pixels:
            peer.send(wire.SendPixels())
            await peer.reader.readexactly(12)
        peer.send(BAD_REPLIES[name])
        await peer.reader.read()

    async with peers(reply) as address:
        with pytest.raises(ConnectionLost) as lost:
            await client().features(address, picture(1))
    assert lost.value.at_work == needs_pixels
