"""TLS between hosts: how it is configured, and the control channel of ranks over it."""

import logging
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from runtime import tls
from runtime.distributed import admission
from runtime.distributed import control_channel as control_channel
from runtime.distributed.control_channel import ControlChannel, RankZero
from runtime.errors import ConfigurationError, EngineDeadError
from tests.certificates import Authority, set_variables
from tests.patience import HANG_S, wait_until

HOST = "127.0.0.1"


@pytest.fixture
def rank_zero(secured) -> Iterator[RankZero]:
    rank_zero = RankZero(HOST, 3)
    yield rank_zero
    rank_zero.close()


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_nothing_is_secured_unless_it_is_configured(value) -> None:
    assert tls.context_for("caller", {"RAY_USE_TLS": value}) is None
    assert tls.context_for("listener", {}) is None


@pytest.mark.parametrize("name", ["RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"])
def test_a_file_that_is_missing_is_named(authority, name) -> None:
    environment = authority.environment()
    with pytest.raises(ConfigurationError, match=f"`{name}` is not"):
        tls.context_for("caller", {**environment, name: ""})
    with pytest.raises(ConfigurationError, match=f"cannot be used.*{name}=/nowhere"):
        tls.context_for("caller", {**environment, name: "/nowhere"})


def test_certificates_are_read_again_only_after_a_change(authority) -> None:
    environment = authority.environment()
    first = tls.context_for("caller", environment)
    assert tls.context_for("caller", environment) is first
    assert tls.context_for("listener", environment) is not first
    authority.environment()  # writes another certificate
    assert tls.context_for("caller", environment) is not first


def test_ranks_join_and_talk_in_both_directions_at_once(rank_zero) -> None:
    with ThreadPoolExecutor(3) as pool:
        gathering = pool.submit(rank_zero.wait_for_ranks)
        one, two = [
            pool.submit(ControlChannel, rank_info).result(HANG_S)
            for rank_info in rank_zero.rank_infos
        ]
        gathering.result(HANG_S)
        assert isinstance(one._connection, tls.SecureSocket)
        message = bytes(range(256)) * 8192
        received = [pool.submit(line.receive) for line in (one, two)]
        for _ in range(50):
            one.send_json({"rank": 1, "text": "x" * 20_000})
            two.send_json({"rank": 2})
            rank_zero.receive_json()
        rank_zero.send(message)
        assert all(each.result(HANG_S) == message for each in received)
        assert rank_zero.machines == [HOST] * 3
        rank_zero.close()
        for line in (one, two):
            with pytest.raises(EOFError):
                line.receive()


def test_one_thread_reads_while_another_writes_more_than_the_buffers_hold(secured) -> None:
    """Both ends write before either has read all; neither call waits for the other."""
    near, far = socket.socketpair()
    ends = [
        tls.SecureSocket(near, tls.context_for("caller"), "caller"),
        tls.SecureSocket(far, tls.context_for("listener"), "listener"),
    ]
    data = bytes(range(256)) * (1 << 14)
    with ThreadPoolExecutor(4) as pool, closing(ends[0]), closing(ends[1]):
        for shaken in [pool.submit(end.handshake) for end in ends]:
            shaken.result(HANG_S)
        reading = [pool.submit(admission.read_exactly, end, len(data)) for end in ends]
        writing = [pool.submit(end.sendall, data) for end in ends]
        for written in writing:
            written.result(HANG_S)
        assert all(read.result(HANG_S) == data for read in reading)


def test_the_end_of_a_rank_is_detected(rank_zero) -> None:
    heard = threading.Event()
    rank_zero.watch = heard.set
    with ThreadPoolExecutor(3) as pool:
        gathering = pool.submit(rank_zero.wait_for_ranks)
        lines = [
            pool.submit(ControlChannel, rank_info).result(HANG_S)
            for rank_info in rank_zero.rank_infos
        ]
        gathering.result(HANG_S)
        lines[1].close()
        assert heard.wait(HANG_S)
        with pytest.raises(EngineDeadError, match="Rank 2 of 3 is gone"):
            rank_zero.check()
        lines[0].close()


@pytest.mark.parametrize("sent", [b"", b"\x16"])
def test_a_connection_that_is_reset_before_it_is_accepted_ends_no_start(rank_zero, sent) -> None:
    """As port scanners do."""
    with socket.create_connection((HOST, rank_zero.rank_infos[0].port)) as scanner:
        scanner.sendall(sent)
        scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with ThreadPoolExecutor(1) as pool, ExitStack() as ending:
        gathering = pool.submit(rank_zero.wait_for_ranks)
        for rank_info in rank_zero.rank_infos:
            ending.enter_context(closing(ControlChannel(rank_info)))
        gathering.result(HANG_S)
        rank_zero.check()


def test_a_rank_with_the_certificate_of_another_ca_is_refused(
    rank_zero, authority, tmp_path, monkeypatch, caplog
) -> None:
    set_variables(monkeypatch, Authority(tmp_path, "other").environment(trusted=authority))
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        gathering = pool.submit(rank_zero.wait_for_ranks)
        with pytest.raises(EngineDeadError, match=r"unknown CA.*RAY_TLS_CA_CERT"):
            ControlChannel(rank_zero.rank_infos[0])
        wait_until(lambda: "certificate is refused" in caplog.text)
        rank_zero.close()
        with pytest.raises(EngineDeadError, match="Rank 0 was closed"):
            gathering.result(HANG_S)


def test_a_first_rank_with_the_certificate_of_another_ca_is_refused(
    rank_zero, authority, tmp_path, monkeypatch
) -> None:
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(rank_zero.wait_for_ranks)
        set_variables(monkeypatch, authority.environment(trusted=Authority(tmp_path, "other")))
        with pytest.raises(EngineDeadError, match=r"certificate is refused.*RAY_TLS_CA_CERT"):
            ControlChannel(rank_zero.rank_infos[0])
        rank_zero.close()
        assert gathering.exception(HANG_S)


def test_a_rank_without_tls_is_refused(rank_zero, monkeypatch) -> None:
    monkeypatch.setattr(admission, "_HANDSHAKE_S", 0.2)
    monkeypatch.setattr(control_channel, "_JOIN_S", 1.0)
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(rank_zero.wait_for_ranks)
        with socket.create_connection((HOST, rank_zero.rank_infos[0].port)) as silent:
            silent.settimeout(HANG_S)
            assert silent.recv(1) == b""  # without a nonce
        monkeypatch.setenv("RAY_USE_TLS", "0")
        with pytest.raises(EngineDeadError, match="cannot reach rank 0"):
            ControlChannel(rank_zero.rank_infos[0])
        rank_zero.close()
        assert gathering.exception(HANG_S)


def test_a_rank_with_tls_refuses_a_first_rank_without(authority, monkeypatch) -> None:
    with closing(RankZero(HOST, 2)) as rank_zero, ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(rank_zero.wait_for_ranks)
        set_variables(monkeypatch, authority.environment())
        with pytest.raises(EngineDeadError, match=r"does not speak TLS.*RAY_USE_TLS=1"):
            ControlChannel(rank_zero.rank_infos[0])
        rank_zero.close()
        assert gathering.exception(HANG_S)
