"""Ends of the direct stream that do not know the token: listeners on a port that a replica has
left, and callers that replay, reflect, downgrade or hold back their proof."""

import asyncio
import dataclasses
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from runtime.engine.request import SamplingParams
from serve_app.gateway.tasks import ChatTask, RawText
from serve_app.transport import features, handshake, wire
from serve_app.transport.client import ConnectionLost, StreamClient
from serve_app.transport.feature_client import FeatureClient
from serve_app.transport.server import StreamServer
from serve_app.transport.watch import Listener, Watcher
from tests.patience import HANG_S, until
from tests.unit.runtime.vision import PretendTower, picture
from tests.unit.serve_app.encoding import CPU, NAME, encoder_of, served
from tests.unit.serve_app.pretend import PretendReplica

HOST = "127.0.0.1"
SECRET = "the secret prompt"
TASK = ChatTask("t1", "demo", RawText(SECRET), SamplingParams())


class Peer:
    """A connection whose messages the test writes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, address: wire.Address) -> "Peer":
        return cls(*await asyncio.open_connection(address.host, address.port))

    async def body(self) -> bytes:
        async with asyncio.timeout(HANG_S):
            length = int.from_bytes(await self.reader.readexactly(4), "big")
            return await self.reader.readexactly(length)

    async def message(self) -> features.Message:
        return features.decode(await self.body())

    def send(self, message) -> None:
        self.writer.write(wire.frame(message))

    async def ended(self) -> bool:
        """Whether the other end closes without another byte."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True
            finally:
                self.writer.close()


Script = Callable[[Peer], Awaitable[None]]


class Impostor:
    """Has the port of a replica that has ended, and keeps what callers send after their proof."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.proofs = 0
        self.heard = b""
        self.left = 0

    async def start(self, token: str) -> wire.Address:
        self.server = await asyncio.start_server(self._serve, HOST)
        return wire.Address(HOST, self.server.sockets[0].getsockname()[1], token)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._script(peer)
            self.proofs += 1
            while data := await reader.read(65536):
                self.heard += data
        writer.close()
        self.left += 1


async def says_nothing_more(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()


async def reflects_the_proof(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    proof = await peer.message()
    peer.send(wire.Accepted(proof.digest))


async def reflects_the_message(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    peer.send(await peer.message())


async def repeats_the_challenge(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()
    peer.send(wire.Challenge(bytes(32)))


async def guesses_the_proof(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()
    peer.send(wire.Accepted(bytes(32)))


async def goes_on_without_proof(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()
    peer.send(wire.Heartbeat())


async def announces_a_long_message(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()
    peer.writer.write((wire.MAX_HANDSHAKE_BYTES + 1).to_bytes(4, "big"))


SCRIPTS: list[Script] = [
    says_nothing_more,
    reflects_the_proof,
    reflects_the_message,
    repeats_the_challenge,
    guesses_the_proof,
    goes_on_without_proof,
    announces_a_long_message,
]


async def asks_for_an_answer(address: wire.Address) -> None:
    client = StreamClient()
    with pytest.raises(ConnectionLost) as lost:
        async with aclosing(client.generate(address, TASK)) as deltas:
            await anext(deltas)
    assert not lost.value.at_work
    client.close()


async def asks_for_features(address: wire.Address) -> None:
    client = FeatureClient(PretendTower().limits, tower=NAME, device=CPU)
    with pytest.raises(ConnectionLost):
        await client.features(address, picture(1))
    client.close()


async def watches(address: wire.Address) -> None:
    lost = asyncio.Event()
    watcher = Watcher(address, Listener(lambda report: None, lost.set), every_s=1.0)
    await lost.wait()
    watcher.close()


CALLERS = [asks_for_an_answer, asks_for_features, watches]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("calls", CALLERS, ids=lambda calls: calls.__name__)
async def test_a_listener_that_does_not_know_the_token_receives_no_more_than_the_proof(
    calls, script, monkeypatch
) -> None:
    monkeypatch.setattr(handshake, "CALLER_TIMEOUT_S", 0.2)
    impostor = Impostor(script)
    address = await impostor.start("the token of the replica that was here")
    async with asyncio.timeout(HANG_S):
        await calls(address)
    await until(lambda: impostor.left)
    assert impostor.proofs >= 1 and impostor.heard == b""
    impostor.server.close()


async def test_a_recorded_handshake_of_the_replica_convinces_no_caller(monkeypatch) -> None:
    """The impostor repeats, byte for byte, what the replica has sent to this caller before."""
    monkeypatch.setattr(handshake, "CALLER_TIMEOUT_S", 0.2)
    async with listening(StreamServer(PretendReplica().generate)) as address:
        greeting, _, accepted = await recorded_handshake(address, wire.PURPOSE)

    async def replays(peer: Peer) -> None:
        peer.writer.write(greeting)
        await peer.body()
        peer.writer.write(accepted)

    impostor = Impostor(replays)
    await asks_for_an_answer(await impostor.start(address.token))
    await until(lambda: impostor.left)
    assert impostor.proofs == 1 and impostor.heard == b""
    impostor.server.close()


@asynccontextmanager
async def listening(server: StreamServer) -> AsyncIterator[wire.Address]:
    try:
        yield await server.start(HOST)
    finally:
        await server.close(drain_s=0)


async def recorded_handshake(address: wire.Address, purpose: str) -> tuple[bytes, bytes, bytes]:
    """The three frames of a genuine handshake."""
    peer = await Peer.to(address)
    frames: list[bytes] = []

    async def send(message) -> None:
        frames.append(wire.frame(message))
        peer.writer.write(frames[-1])

    async def receive() -> features.Message:
        body = await peer.body()
        frames.append(wire.LENGTH.pack(len(body)) + body)
        return features.decode(body)

    await handshake.prove(send, receive, token=address.token, purpose=purpose)
    peer.writer.close()
    greeting, proof, accepted = frames
    return greeting, proof, accepted


async def reflects_the_challenge(peer: Peer, token: str) -> None:
    peer.send(await peer.message())


async def proves_with_the_nonce_of_the_challenge(peer: Peer, token: str) -> None:
    challenge = await peer.message()
    peer.send(wire.Proof(challenge.nonce, challenge.nonce))


async def claims_to_be_the_listener(peer: Peer, token: str) -> None:
    """The right token, the wrong role: what a replica would send."""
    challenge = await peer.message()
    shaken = handshake.Handshake(token, wire.PURPOSE, challenge.nonce, bytes(32))
    peer.send(wire.Proof(bytes(32), shaken.proof("listener")))


async def proves_for_another_purpose(peer: Peer, token: str) -> None:
    challenge = await peer.message()
    shaken = handshake.Handshake(token, "something else", challenge.nonce, bytes(32))
    peer.send(wire.Proof(bytes(32), shaken.proof("caller")))


async def proves_as_the_protocol_did_before(peer: Peer, token: str) -> None:
    """The right token, in the handshake where the listener proved nothing."""
    challenge = await peer.message()
    digest = hmac.digest(token.encode(), challenge.nonce, hashlib.sha256)
    body = b"\x82\xa4type\xa5proof\xa6digest\xc4\x20" + digest
    peer.writer.write(wire.LENGTH.pack(len(body)) + body)


async def skips_the_proof(peer: Peer, token: str) -> None:
    await peer.message()
    peer.send(wire.GenerateRequest(TASK))


HOSTILE_CALLERS = [
    reflects_the_challenge,
    proves_with_the_nonce_of_the_challenge,
    claims_to_be_the_listener,
    proves_for_another_purpose,
    proves_as_the_protocol_did_before,
    skips_the_proof,
]


@asynccontextmanager
async def any_listener(kind: str) -> AsyncIterator[wire.Address]:
    if kind == "answers":
        async with listening(StreamServer(PretendReplica().generate)) as address:
            yield address
    else:
        async with served(encoder_of(PretendTower())) as (_, address):
            yield address


KINDS = pytest.mark.parametrize("kind", ["answers", "features"])


@KINDS
@pytest.mark.parametrize("attack", HOSTILE_CALLERS, ids=lambda attack: attack.__name__)
async def test_a_caller_without_the_right_proof_gets_no_answer(attack, kind) -> None:
    async with any_listener(kind) as address:
        peer = await Peer.to(address)
        await attack(peer, address.token)
        peer.send(wire.Watch(1.0))
        assert await peer.ended()


async def test_the_proof_of_another_connection_is_refused() -> None:
    replica = PretendReplica()
    async with listening(StreamServer(replica.generate)) as address:
        _, proof, _ = await recorded_handshake(address, wire.PURPOSE)
        peer = await Peer.to(address)
        await peer.message()
        peer.writer.write(proof)
        peer.send(wire.GenerateRequest(TASK))
        assert await peer.ended()
    assert replica.tasks == []


async def test_the_token_and_the_task_are_not_in_the_handshake() -> None:
    async with listening(StreamServer(PretendReplica().generate)) as address:
        for sent in await recorded_handshake(address, wire.PURPOSE):
            assert address.token.encode() not in sent
            assert len(sent) <= wire.MAX_HANDSHAKE_BYTES
        assert address.token not in repr(address)


@KINDS
async def test_a_handshake_that_trickles_is_cut_at_the_deadline(kind, monkeypatch) -> None:
    """Each byte arrives in time; the handshake as a whole does not."""
    monkeypatch.setattr(handshake, "LISTENER_TIMEOUT_S", 0.2)
    async with any_listener(kind) as address:
        peer = await Peer.to(address)
        await peer.message()
        sent = 0

        async def trickle() -> None:
            nonlocal sent
            for byte in wire.frame(wire.Proof(bytes(32), bytes(32)))[:-1]:
                peer.writer.write(bytes([byte]))
                sent += 1
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert await peer.ended()
        assert not trickling.done() and sent > 1
        trickling.cancel()


@KINDS
async def test_half_open_handshakes_are_few_and_the_oldest_makes_room(kind, monkeypatch) -> None:
    monkeypatch.setattr(handshake, "MAX_HALF_OPEN", 3)
    monkeypatch.setattr(handshake, "LISTENER_TIMEOUT_S", HANG_S)
    async with any_listener(kind) as address:
        silent = [await Peer.to(address) for _ in range(3)]
        for peer in silent:
            await peer.message()
        purpose = wire.PURPOSE if kind == "answers" else "stream of features"
        await recorded_handshake(address, purpose)
        assert await silent[0].ended()
        for peer in silent[1:]:
            assert not peer.reader.at_eof()
            peer.writer.close()


async def test_a_second_handshake_on_an_accepted_connection_is_refused() -> None:
    async def proves_then_challenges(peer: Peer) -> None:
        async def send(message) -> None:
            peer.send(message)

        await handshake.admit(send, peer.message, token="known", purpose=wire.PURPOSE)
        await peer.body()  # the task
        peer.send(wire.Challenge(bytes(32)))

    impostor = Impostor(proves_then_challenges)
    address = await impostor.start("known")
    client = StreamClient()
    with pytest.raises(ConnectionLost, match="Challenge where Told was due"):
        async with aclosing(client.generate(address, TASK)) as deltas:
            await anext(deltas)
    await until(lambda: impostor.left)
    assert impostor.heard == b""
    client.close()
    impostor.server.close()


async def test_a_wrong_token_is_refused_by_either_side() -> None:
    replica = PretendReplica()
    async with listening(StreamServer(replica.generate)) as address:
        await asks_for_an_answer(dataclasses.replace(address, token="guess"))
    assert replica.tasks == []
