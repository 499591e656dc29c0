"""Requests over TLS: generation, features and load reports; ends that are refused."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import torch

from runtime.engine.request import SamplingParams
from serve_app.messages.replica_load import ReplicaLoad
from serve_app.messages.tasks import ChatTask, RawText, merge
from serve_app.transport import authentication
from serve_app.transport.client import StreamClient
from serve_app.transport.generation import generation_server
from serve_app.transport.load_watcher import LoadWatcher
from serve_app.transport.wire import Address, ConnectionLost, LoadReport
from serve_app.vision.feature_transfer import FeatureClient
from tests.certificates import Authority, set_variables
from tests.patience import HANG_S, until
from tests.unit.runtime.vision.fake_tower import PretendTower, picture
from tests.unit.serve_app.fake_replicas import PretendReplica
from tests.unit.serve_app.transport import peer
from tests.unit.serve_app.vision.served_encoders import CPU, NAME, encoder_of, rounded, served

pytestmark = pytest.mark.usefixtures("secured")
HOST = "127.0.0.1"
TASK = ChatTask("t1", "demo", RawText("the prompt"), SamplingParams())


@asynccontextmanager
async def listening(kind: str) -> AsyncIterator[Address]:
    if kind == "features":
        async with served(encoder_of(PretendTower())) as (_, address):
            yield address
        return
    async with peer.listening(generation_server(PretendReplica().generate)) as address:
        yield address


async def answered(address: Address) -> None:
    client = StreamClient()
    async with aclosing(client.generate(address, TASK)) as deltas:
        assert merge([delta async for delta in deltas]).text == "Hello, world"
    client.close()


async def encoded(address: Address) -> None:
    client = FeatureClient(PretendTower().limits, tower=NAME, device=CPU)
    for _ in range(2):  # over one connection
        assert torch.equal(await client.features(address, picture(1)), rounded(picture(1)))
    client.close()


KINDS = pytest.mark.parametrize(("kind", "call"), [("answers", answered), ("features", encoded)])


@KINDS
async def test_requests_are_answered_over_tls(kind, call) -> None:
    async with listening(kind) as address:
        for _ in range(2):
            await call(address)


@KINDS
async def test_nothing_is_sent_in_the_clear(kind, call) -> None:
    async with listening(kind) as address:
        crossed = bytearray()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                crossed.extend(data)
                writer.write(data)
            writer.close()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(address.host, address.port)
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

        between = await asyncio.start_server(forward, HOST)
        port = between.sockets[0].getsockname()[1]
        await call(Address(HOST, port, address.token))
        assert len(crossed) > 1000
        for word in (b"the prompt", b"Hello", b"challenge", b"bfloat16"):
            assert word not in crossed
        between.close()


async def test_load_reports_arrive() -> None:
    reports: list[LoadReport] = []
    server = generation_server(
        PretendReplica().generate,
        report=lambda since: LoadReport(ReplicaLoad(running=3), (), since),
    )
    async with peer.listening(server) as address:
        watcher = LoadWatcher(address, reports.append, lambda: None, every_s=0.02)
        await until(lambda: reports)
        assert reports[0].load.running == 3
        watcher.close()


async def test_load_reports_arrive_again_after_certificates_were_replaced(
    authority, caplog
) -> None:
    """For a moment, the key is not that of the certificate."""
    key = Path(os.environ["RAY_TLS_SERVER_KEY"])
    reports: list[LoadReport] = []
    server = generation_server(
        PretendReplica().generate, report=lambda since: LoadReport(ReplicaLoad(), (), since)
    )
    address = await server.start(HOST)
    watcher = LoadWatcher(address, reports.append, lambda: None, every_s=0.02)
    await until(lambda: reports)
    before = key.read_bytes()
    authority.environment("other")
    key.write_bytes(key.with_name("cluster-other.key").read_bytes())
    with caplog.at_level(logging.WARNING):
        for connection in list(server._connections):
            connection.close()
        await until(lambda: "no connection: The TLS files cannot be used" in caplog.text)
        with pytest.raises(ConnectionLost, match="this host's TLS files") as lost:
            await answered(address)
        assert str(key) not in str(lost.value)
    key.write_bytes(before)
    reports.clear()
    await until(lambda: reports)
    await answered(address)
    watcher.close()
    await server.close(drain_s=0)


async def test_a_caller_with_the_certificate_of_another_ca_is_refused(
    authority, tmp_path, monkeypatch, caplog
) -> None:
    async with listening("answers") as address:
        set_variables(monkeypatch, Authority(tmp_path, "other").environment(trusted=authority))
        with caplog.at_level(logging.WARNING):
            with pytest.raises(ConnectionLost, match=r"certificate.*RAY_TLS_CA_CERT"):
                await answered(address)
            await until(lambda: "certificate is refused" in caplog.text)


async def test_a_listener_with_the_certificate_of_another_ca_is_refused(
    authority, tmp_path, monkeypatch
) -> None:
    async with listening("answers") as address:
        set_variables(monkeypatch, authority.environment(trusted=Authority(tmp_path, "other")))
        with pytest.raises(ConnectionLost, match=r"certificate is refused.*RAY_TLS_CA_CERT"):
            await answered(address)


async def test_a_caller_without_tls_receives_nothing(monkeypatch) -> None:
    monkeypatch.setattr(authentication, "LISTENER_TIMEOUT_S", 0.2)
    async with listening("answers") as address:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        async with asyncio.timeout(HANG_S):
            assert await reader.read() == b""
        writer.close()
        monkeypatch.setenv("RAY_USE_TLS", "0")
        with pytest.raises(ConnectionLost):
            await answered(address)


async def test_the_log_says_why_a_caller_without_tls_is_refused(caplog) -> None:
    async with listening("answers") as address:
        with caplog.at_level(logging.WARNING):
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"\0\0\0\x20" + bytes(32))
            await until(lambda: "does not speak TLS" in caplog.text)
            writer.close()


async def test_a_listener_without_tls_is_refused(monkeypatch, authority) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "0")
    async with listening("answers") as address:
        monkeypatch.setenv("RAY_USE_TLS", "1")
        with pytest.raises(ConnectionLost, match=r"does not speak TLS.*RAY_USE_TLS=1"):
            await answered(address)


async def test_incomplete_tls_handshakes_are_limited_and_the_oldest_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(authentication, "MAX_HALF_OPEN", 3)
    monkeypatch.setattr(authentication, "LISTENER_TIMEOUT_S", HANG_S)
    async with listening("answers") as address:
        silent = [await asyncio.open_connection(address.host, address.port) for _ in range(3)]
        await answered(address)
        async with asyncio.timeout(HANG_S):
            assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()
