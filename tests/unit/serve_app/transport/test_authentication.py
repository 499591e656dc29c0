"""Ends that do not know the token: listeners on the port of a replica that has ended, and callers
that replay, reflect, downgrade or withhold their proof."""

import asyncio
import dataclasses
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from runtime.distributed.handshake import Handshake
from runtime.engine.request import SamplingParams
from serve_app.messages.tasks import ChatTask, RawText
from serve_app.transport import authentication, client, wire
from serve_app.transport.client import StreamClient
from serve_app.transport.generation import generation_server
from serve_app.transport.load_watcher import LoadWatcher
from serve_app.transport.wire import ConnectionLost
from serve_app.vision.feature_transfer import FeatureClient
from tests.patience import HANG_S, pass_time, until
from tests.unit.runtime.vision.fake_tower import PretendTower, picture
from tests.unit.serve_app.fake_replicas import PretendReplica
from tests.unit.serve_app.transport.peer import HOST, Peer, listening
from tests.unit.serve_app.vision.served_encoders import CPU, NAME

SECRET = "the secret prompt"
TASK = ChatTask("t1", "demo", RawText(SECRET), SamplingParams())


Script = Callable[[Peer], Awaitable[None]]


class Impostor:
    """Has the port of a replica that has ended. `received`: what callers send after the script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.proofs = 0
        self.received = b""
        self.closed = 0

    async def start(self, token: str) -> wire.Address:
        self.server = await asyncio.start_server(self._serve, HOST)
        return wire.Address(HOST, self.server.sockets[0].getsockname()[1], token)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._script(peer)
            self.proofs += 1
            while data := await reader.read(65536):
                self.received += data
        writer.close()
        self.closed += 1


async def sends_nothing_more(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()


async def reflects_the_proof(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    proof = await peer.receive()
    peer.send(wire.Accepted(proof.digest))


async def reflects_the_whole_message(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    peer.send(await peer.receive())


async def repeats_the_challenge(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()
    peer.send(wire.Challenge(bytes(32)))


async def guesses_the_proof(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()
    peer.send(wire.Accepted(bytes(32)))


async def continues_without_proof(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()
    peer.send(wire.Heartbeat())


async def announces_a_message_beyond_the_limit(peer: Peer) -> None:
    peer.send(wire.Challenge(bytes(32)))
    await peer.body()
    peer.writer.write((wire.MAX_HANDSHAKE_BYTES + 1).to_bytes(4, "big"))


SCRIPTS: list[Script] = [
    sends_nothing_more,
    reflects_the_proof,
    reflects_the_whole_message,
    repeats_the_challenge,
    guesses_the_proof,
    continues_without_proof,
    announces_a_message_beyond_the_limit,
]


async def requests_an_answer(address: wire.Address) -> None:
    streams = StreamClient()
    with pytest.raises(ConnectionLost) as lost:
        async with aclosing(streams.generate(address, TASK)) as deltas:
            await anext(deltas)
    assert not lost.value.at_work
    streams.close()


async def requests_features(address: wire.Address) -> None:
    features = FeatureClient(PretendTower().limits, tower=NAME, device=CPU)
    with pytest.raises(ConnectionLost):
        await features.features(address, picture(1))
    features.close()


async def subscribes(address: wire.Address) -> None:
    lost = asyncio.Event()
    watcher = LoadWatcher(address, lambda report: None, lost.set, every_s=1.0)
    await lost.wait()
    watcher.close()


CALLS = [(requests_an_answer, script) for script in SCRIPTS]
CALLS += [(requests_features, guesses_the_proof), (subscribes, guesses_the_proof)]


@pytest.mark.parametrize(("calls", "script"), CALLS, ids=lambda each: each.__name__)
async def test_a_listener_that_does_not_know_the_token_receives_no_more_than_the_proof(
    calls, script, monkeypatch
) -> None:
    monkeypatch.setattr(authentication, "CALLER_TIMEOUT_S", 0.2)
    impostor = Impostor(script)
    address = await impostor.start("the token of the replica that was here")
    async with asyncio.timeout(HANG_S):
        await calls(address)
    await until(lambda: impostor.closed)
    assert impostor.proofs >= 1 and impostor.received == b""
    impostor.server.close()


async def test_a_recorded_handshake_of_the_replica_is_refused_by_callers(monkeypatch) -> None:
    """The impostor repeats the bytes that the replica sent to this caller before."""
    monkeypatch.setattr(authentication, "CALLER_TIMEOUT_S", 0.2)
    async with listening(generation_server(PretendReplica().generate)) as address:
        challenge, _, accepted = await recorded_handshake(address)

    async def replays(peer: Peer) -> None:
        peer.writer.write(challenge)
        await peer.body()
        peer.writer.write(accepted)

    impostor = Impostor(replays)
    await requests_an_answer(await impostor.start(address.token))
    await until(lambda: impostor.closed)
    assert impostor.proofs == 1 and impostor.received == b""
    impostor.server.close()


class RecordingPeer(Peer):
    """Keeps the frames of both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.frames: list[bytes] = []

    def send(self, message: wire.WireMessage) -> None:
        self.frames.append(wire.frame(message))
        super().send(message)

    async def receive(self) -> wire.WireMessage:
        body = await self.body()
        self.frames.append(wire.LENGTH.pack(len(body)) + body)
        return wire.decode(body)


async def recorded_handshake(address: wire.Address) -> tuple[bytes, bytes, bytes]:
    """The three frames of a genuine handshake."""
    peer = await RecordingPeer.authenticated(address)
    peer.writer.close()
    challenge, proof, accepted = peer.frames
    return challenge, proof, accepted


async def reflects_the_challenge(peer: Peer, token: str) -> None:
    peer.send(await peer.receive())


async def proves_with_the_nonce_of_the_challenge(peer: Peer, token: str) -> None:
    challenge = await peer.receive()
    peer.send(wire.Proof(challenge.nonce, challenge.nonce))


async def claims_to_be_the_listener(peer: Peer, token: str) -> None:
    """The right token, the role of the listener."""
    challenge = await peer.receive()
    handshake = Handshake(token, authentication.PURPOSE, challenge.nonce, bytes(32))
    peer.send(wire.Proof(bytes(32), handshake.proof("listener")))


async def proves_for_another_purpose(peer: Peer, token: str) -> None:
    challenge = await peer.receive()
    handshake = Handshake(token, "something else", challenge.nonce, bytes(32))
    peer.send(wire.Proof(bytes(32), handshake.proof("caller")))


async def proves_as_the_protocol_did_before(peer: Peer, token: str) -> None:
    """The right token, in an older handshake where the listener proved nothing."""
    challenge = await peer.receive()
    digest = hmac.digest(token.encode(), challenge.nonce, hashlib.sha256)
    body = b"\x82\xa4type\xa5proof\xa6digest\xc4\x20" + digest
    peer.writer.write(wire.LENGTH.pack(len(body)) + body)


async def skips_the_proof(peer: Peer, token: str) -> None:
    await peer.receive()
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
async def listener() -> AsyncIterator[wire.Address]:
    async with listening(generation_server(PretendReplica().generate)) as address:
        yield address


@pytest.mark.parametrize("attack", HOSTILE_CALLERS, ids=lambda attack: attack.__name__)
async def test_a_caller_without_the_right_proof_receives_no_reply(attack) -> None:
    async with listener() as address:
        peer = await Peer.to(address)
        await attack(peer, address.token)
        peer.send(wire.Watch(1.0))
        assert await peer.closed()


async def test_the_proof_of_another_connection_is_refused() -> None:
    replica = PretendReplica()
    async with listening(generation_server(replica.generate)) as address:
        _, proof, _ = await recorded_handshake(address)
        peer = await Peer.to(address)
        await peer.receive()
        peer.writer.write(proof)
        peer.send(wire.GenerateRequest(TASK))
        assert await peer.closed()
    assert replica.tasks == []


async def test_the_token_and_the_task_are_not_in_the_handshake() -> None:
    async with listening(generation_server(PretendReplica().generate)) as address:
        for sent in await recorded_handshake(address):
            assert address.token.encode() not in sent
            assert len(sent) <= wire.MAX_HANDSHAKE_BYTES
        assert address.token not in repr(address)


async def test_a_handshake_that_trickles_is_closed_at_the_deadline(monkeypatch) -> None:
    """Each byte arrives in time, the whole handshake does not."""
    monkeypatch.setattr(authentication, "LISTENER_TIMEOUT_S", 10.0)
    async with listener() as address:
        peer = await Peer.to(address)
        await peer.receive()
        sent = 0

        async def trickle() -> None:
            nonlocal sent
            for byte in wire.frame(wire.Proof(bytes(32), bytes(32)))[:-1]:
                peer.writer.write(bytes([byte]))
                sent += 1
                await pass_time(1.0)

        trickling = asyncio.create_task(trickle())
        assert await peer.closed()
        assert not trickling.done() and sent > 1
        trickling.cancel()


async def test_half_open_handshakes_are_limited_and_the_oldest_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(authentication, "MAX_HALF_OPEN", 3)
    monkeypatch.setattr(authentication, "LISTENER_TIMEOUT_S", HANG_S)
    async with listener() as address:
        silent = [await Peer.to(address) for _ in range(3)]
        for peer in silent:
            await peer.receive()
        await recorded_handshake(address)
        assert await silent[0].closed()
        for peer in silent[1:]:
            assert not peer.reader.at_eof()
            peer.writer.close()


async def test_many_genuine_callers_at_once_are_all_admitted(monkeypatch) -> None:
    """Such as the streams of a lost replica: they are more than may be half open."""
    monkeypatch.setattr(authentication, "MAX_HALF_OPEN", client.MAX_HANDSHAKES)
    replica = PretendReplica()
    streams = StreamClient()
    async with listening(generation_server(replica.generate)) as address:

        async def answer() -> None:
            async with aclosing(streams.generate(address, TASK)) as deltas:
                assert [delta async for delta in deltas]

        await asyncio.gather(*(answer() for _ in range(5 * client.MAX_HANDSHAKES)))
        streams.close()
    assert len(replica.tasks) == 5 * client.MAX_HANDSHAKES


async def test_callers_do_not_wait_one_after_the_other_for_a_listener_that_hangs(
    monkeypatch,
) -> None:
    monkeypatch.setattr(authentication, "CALLER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(client, "MAX_HANDSHAKES", 2)
    hung = Impostor(sends_nothing_more)
    address = await hung.start("token")
    streams = StreamClient()

    async def refused() -> None:
        with pytest.raises(ConnectionLost, match="has not answered in time"):
            async with aclosing(streams.generate(address, TASK)) as deltas:
                await anext(deltas)

    await asyncio.gather(*(refused() for _ in range(9)))
    await until(lambda: hung.closed)
    assert hung.proofs == 2, "the others learnt of these"
    with pytest.raises(ConnectionLost):
        async with aclosing(streams.generate(address, TASK)) as deltas:
            await anext(deltas)
    assert hung.proofs == 3, "a later caller tries again"
    await until(lambda: hung.closed == 3)
    streams.close()
    hung.server.close()


async def test_a_second_handshake_on_an_accepted_connection_is_refused() -> None:
    async def proves_then_challenges(peer: Peer) -> None:
        await authentication.admit(peer, "known")
        await peer.body()  # the task
        peer.send(wire.Challenge(bytes(32)))

    impostor = Impostor(proves_then_challenges)
    address = await impostor.start("known")
    streams = StreamClient()
    with pytest.raises(ConnectionLost, match="Expected a delta, received Challenge"):
        async with aclosing(streams.generate(address, TASK)) as deltas:
            await anext(deltas)
    await until(lambda: impostor.closed)
    assert impostor.received == b""
    streams.close()
    impostor.server.close()


async def test_a_wrong_token_is_refused_by_either_side() -> None:
    replica = PretendReplica()
    async with listening(generation_server(replica.generate)) as address:
        await requests_an_answer(dataclasses.replace(address, token="guess"))
    assert replica.tasks == []
