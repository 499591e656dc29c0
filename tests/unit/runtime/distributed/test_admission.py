"""Admission of ranks: peers without the token guess, replay, reflect, flood
and hold back, on both ends of the control channel."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest

from runtime.distributed import admission
from runtime.distributed import control_channel as control_channel
from runtime.distributed.control_channel import ControlChannel, RankInfo, RankZero
from runtime.distributed.handshake import DIGEST_BYTES, NONCE_BYTES, Handshake, Role
from runtime.errors import EngineDeadError
from tests.patience import HANG_S, wait_until

HOST = "127.0.0.1"
ANSWER_BYTES = 4 + NONCE_BYTES + DIGEST_BYTES


@pytest.fixture
def gathering(rank_zero) -> Iterator[Future[None]]:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rank_zero.wait_for_ranks)
        try:
            yield future
        finally:
            rank_zero.close()


def connected(rank_info: RankInfo) -> socket.socket:
    return socket.create_connection((rank_info.host, rank_info.port), timeout=HANG_S)


def nonce_of(line: socket.socket) -> bytes:
    return admission.read_exactly(line, NONCE_BYTES)


def cut(line: socket.socket) -> bool:
    """Whether rank 0 closes the connection without sending another byte."""
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def join(rank_zero: RankZero, gathering: Future[None]) -> None:
    """The genuine ranks join, and no other one."""
    with ExitStack() as ending:
        for rank_info in rank_zero.rank_infos:
            ending.enter_context(closing(ControlChannel(rank_info)))
        gathering.result(HANG_S)
        assert rank_zero.machines == [HOST] * 3
        rank_zero.check()


def answer(
    rank_info: RankInfo, nonce: bytes, *, purpose: str | None = None, role: Role = "caller"
) -> bytes:
    handshake = Handshake(
        rank_info.token,
        purpose or f"rank {rank_info.rank} of {rank_info.size}",
        nonce,
        bytes(NONCE_BYTES),
    )
    return struct.pack("<I", rank_info.rank) + bytes(NONCE_BYTES) + handshake.proof(role)


def old_hello(rank_info: RankInfo, nonce: bytes) -> bytes:
    """The obsolete protocol: the token itself."""
    words = json.dumps({"rank": rank_info.rank, "token": rank_info.token}).encode()
    return struct.pack("<I", len(words)) + words.ljust(ANSWER_BYTES)


ATTACKS: dict[str, Callable[[RankInfo, bytes], bytes]] = {
    "a guessed token": lambda rank_info, nonce: answer(replace(rank_info, token="guess"), nonce),
    "a rank that is none": lambda rank_info, nonce: answer(replace(rank_info, rank=7), nonce),
    "the first rank": lambda rank_info, nonce: answer(replace(rank_info, rank=0), nonce),
    "another rank's proof": lambda rank_info, nonce: answer(
        rank_info, nonce, purpose="rank 2 of 3"
    ),
    "another size": lambda rank_info, nonce: answer(rank_info, nonce, purpose="rank 1 of 2"),
    "the other role": lambda rank_info, nonce: answer(rank_info, nonce, role="listener"),
    "a proof for another nonce": lambda rank_info, nonce: answer(rank_info, bytes(NONCE_BYTES)),
    "the challenge, echoed": lambda rank_info, nonce: b"\1\0\0\0" + nonce + nonce,
    "the protocol without proofs": old_hello,
    "noise": lambda rank_info, nonce: b"\xff" * 10_000,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_connection_without_proof_is_closed_and_takes_no_rank(rank_zero, gathering, name) -> None:
    with connected(rank_zero.rank_infos[0]) as line:
        line.sendall(ATTACKS[name](rank_zero.rank_infos[0], nonce_of(line)))
        assert cut(line)
    join(rank_zero, gathering)


def test_the_proof_of_an_earlier_connection_is_refused(rank_zero, gathering) -> None:
    rank_info = rank_zero.rank_infos[0]
    with connected(rank_info) as first, connected(rank_info) as second:
        recorded = answer(rank_info, nonce_of(first))
        assert nonce_of(second) not in recorded
        second.sendall(recorded)
        assert cut(second)
    join(rank_zero, gathering)


def test_a_rank_joins_once(rank_zero, gathering) -> None:
    with (
        closing(ControlChannel(rank_zero.rank_infos[0])),
        connected(rank_zero.rank_infos[0]) as line,
    ):
        line.sendall(answer(rank_zero.rank_infos[0], nonce_of(line)))
        assert cut(line)
        with closing(ControlChannel(rank_zero.rank_infos[1])):
            gathering.result(HANG_S)
            rank_zero.check()


def test_connections_that_withhold_their_proof_delay_no_rank(rank_zero, monkeypatch) -> None:
    """They connect first, and none is closed before the ranks have joined."""
    monkeypatch.setattr(admission, "_HANDSHAKE_S", HANG_S)
    with ExitStack() as strangers, ThreadPoolExecutor(1) as pool:
        for count in range(3):
            line = strangers.enter_context(connected(rank_zero.rank_infos[0]))
            line.sendall(b"\1" * count)
        join(rank_zero, pool.submit(rank_zero.wait_for_ranks))


def test_a_slow_handshake_is_closed_at_its_deadline(rank_zero, gathering, monkeypatch) -> None:
    """Each byte arrives in time; the handshake as a whole does not."""
    monkeypatch.setattr(admission, "_HANDSHAKE_S", 0.3)
    with connected(rank_zero.rank_infos[0]) as line:
        nonce_of(line)
        stop = threading.Event()

        def trickle() -> None:
            for _ in range(ANSWER_BYTES - 1):
                if stop.wait(0.15):
                    return
                with suppress(OSError):  # it is cut meanwhile
                    line.sendall(b"\1")

        trickling = threading.Thread(target=trickle)
        trickling.start()
        assert cut(line)
        assert trickling.is_alive()
        stop.set()
        trickling.join()
    monkeypatch.undo()
    join(rank_zero, gathering)


def test_half_open_handshakes_are_limited_and_the_oldest_is_closed(rank_zero, monkeypatch) -> None:
    monkeypatch.setattr(admission, "_HANDSHAKE_S", HANG_S)
    monkeypatch.setattr(admission, "_MAX_HALF_OPEN", 3)
    with ExitStack() as strangers, ThreadPoolExecutor(1) as pool:
        lines = [strangers.enter_context(connected(rank_zero.rank_infos[0])) for _ in range(5)]
        gathering = pool.submit(rank_zero.wait_for_ranks)
        for line in lines:
            nonce_of(line)
        assert cut(lines[0]) and cut(lines[1])
        join(rank_zero, gathering)


def test_closing_ends_the_wait_for_ranks(rank_zero, gathering) -> None:
    with connected(rank_zero.rank_infos[0]) as line:
        nonce_of(line)
        rank_zero.close()
        with pytest.raises(EngineDeadError, match="Rank 0 was closed"):
            gathering.result(HANG_S)
        assert cut(line)


class Impostor:
    """Listens on the port of a rank 0 that has ended; records what a rank sends."""

    def __init__(self, reply: Callable[[socket.socket, bytes], None]) -> None:
        self._reply = reply
        self._door = socket.create_server((HOST, 0))
        self.rank_info = RankInfo(
            1, 2, HOST, self._door.getsockname()[1], "the token of the first rank"
        )
        self.heard: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._door.accept()
            except OSError:
                return
            with line:
                heard = b""
                try:
                    line.sendall(bytes(NONCE_BYTES))
                    heard = admission.read_exactly(line, ANSWER_BYTES)
                    self._reply(line, heard)
                    while part := line.recv(4096):
                        heard += part
                except (OSError, EOFError):
                    pass
                self.heard.append(heard)

    def close(self) -> None:
        self._door.close()


REPLIES: dict[str, Callable[[socket.socket, bytes], None]] = {
    "its own proof, reflected": lambda line, heard: line.sendall(heard[-DIGEST_BYTES:]),
    "a guess": lambda line, heard: line.sendall(bytes(DIGEST_BYTES)),
    "a message instead": lambda line, heard: line.sendall(struct.pack("<I", 100) + b"{" * 100),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_rank_refuses_a_rank_0_that_does_not_know_the_token(name) -> None:
    with closing(Impostor(REPLIES[name])) as impostor:
        with pytest.raises(EngineDeadError, match="does not know the token"):
            ControlChannel(impostor.rank_info)
        wait_until(lambda: impostor.heard)
    assert [len(heard) for heard in impostor.heard] == [ANSWER_BYTES]
    assert impostor.rank_info.token.encode() not in impostor.heard[0]


def test_joining_a_silent_rank_0_times_out(monkeypatch) -> None:
    monkeypatch.setattr(control_channel, "_JOIN_S", 0.3)
    with (
        closing(Impostor(lambda line, heard: None)) as impostor,
        pytest.raises(EngineDeadError, match="cannot reach rank 0"),
    ):
        ControlChannel(impostor.rank_info)


def test_the_token_is_not_in_the_representation_of_rank_info(rank_zero) -> None:
    assert rank_zero.rank_infos[0].token not in repr(rank_zero.rank_infos[0])
