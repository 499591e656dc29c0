"""A pool of encoders as an engine uses it: ranking, failover, lost encoders."""

import asyncio
import threading
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack
from dataclasses import asdict, replace

import pytest
import torch

from runtime.errors import (
    GenerationFailedError,
    ModelUnavailableError,
    ReplicaLostError,
    RequestError,
)
from runtime.vision.feature_cache import FeatureStore
from serve_app.routing.replica_calls import Replicas
from serve_app.transport.sockets import connect
from serve_app.transport.stream_server import StreamServer
from serve_app.transport.wire import Address
from serve_app.vision.encoder_ranking import (
    ANSWER_TIMEOUT_S,
    DeploymentEncoders,
    EncoderRanking,
)
from serve_app.vision.encoder_replica import EncoderReplica
from tests.patience import HANG_S, pass_time, settled, until
from tests.unit.runtime.vision.fake_tower import PretendTower, picture
from tests.unit.serve_app.fake_calls import FakeCalls
from tests.unit.serve_app.vision.served_encoders import (
    FAST_RETRIES,
    ListedEncoders,
    encoded,
    encoder_of,
    pool_of,
    rounded,
    served,
)

TOWER = PretendTower()
LOST = ReplicaLostError("it has ended")
CLOSED = Address("127.0.0.1", 9, "token")  # the discard service, which is not running


class Pool:
    """One encoder per tower, and the source that lists them."""

    def __init__(self, *towers: PretendTower) -> None:
        self.towers = list(towers)
        self.source = ListedEncoders()
        self.encoders: list[EncoderReplica] = []
        self.servers: list[StreamServer] = []
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "Pool":
        for tower in self.towers:
            await self.add(tower)
        return self

    async def __aexit__(self, *_) -> None:
        await self._opened.aclose()

    async def add(self, tower: PretendTower, **options) -> None:
        encoder = encoder_of(tower, **options)
        server, address = await self._opened.enter_async_context(served(encoder))
        self.encoders.append(encoder)
        self.servers.append(server)
        self.source.append(address)

    async def first(self, digest: bytes) -> int:
        """The index of the encoder that is asked first."""
        ranking = EncoderRanking(self.source)
        return self.source.index((await ranking.ranked(digest))[0])

    @property
    def waiting(self) -> int:
        """Requests at all encoders, running ones included."""
        return sum(encoder.statistics().images_waiting for encoder in self.encoders)

    @property
    def encoded(self) -> list[list[int]]:
        return [tower.encoded for tower in self.towers]


async def test_model_replicas_share_encoded_images() -> None:
    async with Pool(*(PretendTower() for _ in range(3))) as pool:
        async with pool_of(pool.source, TOWER) as one, pool_of(pool.source, TOWER) as two:
            for image in map(picture, range(1, 41)):
                for replica in (one, two, one):
                    assert torch.equal(await encoded(replica, image), rounded(image))
        numbers = [number for tower in pool.encoded for number in tower]
        assert sorted(numbers) == list(range(1, 41))
        assert all(pool.encoded), "each encoder has encoded some"
        assert one.weight_bytes == 0 and one.workspace_bytes == 2 * 8 * 16 * 2


async def test_adding_or_removing_an_encoder_moves_only_its_own_images() -> None:
    addresses = [Address("10.0.0.1", port, "t") for port in range(5)]
    digests = [bytes([number]) for number in range(200)]

    async def firsts(known: list[Address]) -> list[Address]:
        encoders = EncoderRanking(ListedEncoders(known))
        return [(await encoders.ranked(digest))[0] for digest in digests]

    all_five, four = await firsts(addresses), await firsts(addresses[:-1])
    for before, after in zip(all_five, four, strict=True):
        assert after == before or before == addresses[-1]
    assert all(20 < all_five.count(address) < 60 for address in addresses)


async def test_a_dead_encoder_is_skipped_and_then_avoided(monkeypatch) -> None:
    tower = PretendTower()
    async with Pool(tower) as pool:
        pool.source.append(CLOSED)
        numbers = [n for n in range(1, 40) if await pool.first(bytes([n])) == 1][:5]
        opened = count_connections(monkeypatch)
        async with pool_of(pool.source, TOWER) as replica:
            for number in numbers:
                found = await encoded(replica, picture(number))
                assert torch.equal(found, rounded(picture(number)))
        assert tower.encoded == numbers and opened.count(CLOSED) == 1


def count_connections(monkeypatch) -> list[Address]:
    opened: list[Address] = []

    async def noted(address):
        opened.append(address)
        return await connect(address)

    monkeypatch.setattr("serve_app.transport.client.connect", noted)
    return opened


async def test_an_image_of_an_encoder_that_stops_is_encoded_by_another() -> None:
    gate = threading.Semaphore(0)
    async with Pool(PretendTower(gate=gate), PretendTower(gate=gate)) as pool:
        async with pool_of(pool.source, TOWER) as replica:
            number, *_ = [n for n in range(1, 40) if await pool.first(bytes([n])) == 0]
            image = picture(number)
            asked = asyncio.create_task(encoded(replica, image))
            await until(lambda: pool.towers[0].entered.acquire(blocking=False))
            await pool.servers[0].close(drain_s=0)
            await until(lambda: pool.towers[1].entered.acquire(blocking=False))
            gate.release(100)
            assert torch.equal(await asked, rounded(image))
        await until(lambda: pool.encoded == [[number], [number]])  # by the first one, too


async def test_an_image_of_a_silent_encoder_is_encoded_by_another(monkeypatch) -> None:
    monkeypatch.setattr("serve_app.transport.authentication.CALLER_TIMEOUT_S", 0.3)

    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1")
    hung = Address("127.0.0.1", server.sockets[0].getsockname()[1], "token")
    async with Pool(tower := PretendTower()) as pool:
        pool.source.append(hung)
        number, *_ = [n for n in range(1, 40) if await pool.first(bytes([n])) == 1]
        async with pool_of(
            pool.source, TOWER, rules=replace(FAST_RETRIES, silence_s=0.3)
        ) as replica:
            found = await encoded(replica, picture(number))
        assert torch.equal(found, rounded(picture(number))) and tower.encoded == [number]
    server.close()


async def test_images_of_a_failed_device_are_encoded_elsewhere() -> None:
    class Dead(PretendTower):
        def encode(self, pixels, grid, pause):
            raise torch.AcceleratorError("unspecified launch failure")

    async with Pool(Dead(), PretendTower()) as pool, pool_of(pool.source, TOWER) as replica:
        for image in map(picture, range(1, 9)):
            assert torch.equal(await encoded(replica, image), rounded(image))


async def test_an_encoder_that_is_started_later_is_found() -> None:
    async with Pool() as pool, pool_of(pool.source, TOWER) as replica:
        asked = [asyncio.create_task(encoded(replica, picture(n))) for n in (1, 2)]
        await until(lambda: pool.source.listings > 3)
        await pool.add(PretendTower())
        for number, task in zip((1, 2), asked, strict=True):
            assert torch.equal(await task, rounded(picture(number)))


async def test_without_an_encoder_the_image_fails_at_the_timeout_with_the_reason() -> None:
    rules = replace(FAST_RETRIES, timeout_s=0.3)
    async with pool_of(ListedEncoders([CLOSED]), TOWER, rules=rules) as replica:
        with pytest.raises(GenerationFailedError, match=r"for 0\.3 seconds.*No|refused|broken"):
            await encoded(replica, picture(1))
    async with pool_of(ListedEncoders(), TOWER, rules=rules) as replica:
        with pytest.raises(GenerationFailedError, match="no vision encoder has answered"):
            await encoded(replica, picture(1))


async def test_waiting_in_the_queue_of_an_encoder_takes_any_time() -> None:
    rules = replace(FAST_RETRIES, timeout_s=0.2)
    gate = threading.Semaphore(0)
    async with Pool(PretendTower(gate=gate)) as pool:
        pool.servers[0]._heartbeat_s = 0.02
        async with pool_of(pool.source, TOWER, rules=rules) as replica:
            images = list(map(picture, range(1, 9)))
            asked = [asyncio.create_task(encoded(replica, image)) for image in images]
            await until(lambda: pool.waiting == len(images))
            begun_s = replica._loop.time()
            await until(lambda: replica._loop.time() > begun_s + 2 * rules.timeout_s)
            gate.release(100)
            for image, features in zip(images, await asyncio.gather(*asked), strict=True):
                assert torch.equal(features, rounded(image))


async def test_an_image_of_a_stalled_encoder_is_encoded_by_another() -> None:
    """Its event loop runs, but its tower finishes no image."""
    now_s, gate = 0.0, threading.Semaphore(0)
    async with Pool(PretendTower()) as pool:
        await pool.add(stuck := PretendTower(gate=gate), clock=lambda: now_s)
        pool.servers[1]._heartbeat_s = 0.02
        number, *_ = [n for n in range(1, 40) if await pool.first(bytes([n])) == 1]
        rules = replace(FAST_RETRIES, silence_s=0.3)
        async with pool_of(pool.source, TOWER, rules=rules) as replica:
            asked = asyncio.create_task(encoded(replica, picture(number)))
            await until(lambda: stuck.entered.acquire(blocking=False))
            now_s += 301.0
            try:
                found = await asked
                assert pool.encoded == [[number]] and stuck.encoded == []
            finally:
                gate.release(100)
            assert torch.equal(found, rounded(picture(number)))


async def test_an_image_that_kills_encoders_fails_and_others_are_encoded() -> None:
    """As if encoding crashed the process: the connection breaks once the pixels are received."""

    class Deadly(PretendTower):
        def encode(self, pixels, grid, pause):
            if int(pixels[0, 0]) == 7:
                self.batches.append([7])
                loop.call_soon_threadsafe(self.cut)
                self.over.wait(HANG_S)
            return super().encode(pixels, grid, pause)

    loop = asyncio.get_running_loop()
    towers = [Deadly() for _ in range(5)]
    async with Pool(*towers) as pool, pool_of(pool.source, TOWER) as replica:
        for tower, server in zip(towers, pool.servers, strict=True):
            tower.over = threading.Event()
            tower.cut = lambda server=server: [each.close() for each in [*server._connections]]
        with pytest.raises(GenerationFailedError, match="3 vision encoders were lost"):
            await encoded(replica, picture(7))
        for tower in towers:
            tower.over.set()
        assert sum(tower.encoded.count(7) for tower in towers) >= 3
        for number in range(8, 16):
            found = await encoded(replica, picture(number))
            assert torch.equal(found, rounded(picture(number)))


async def test_an_image_that_cannot_be_encoded_fails_alone_and_is_not_retried() -> None:
    towers = [PretendTower(broken=frozenset([3])) for _ in range(2)]
    async with Pool(*towers) as pool, pool_of(pool.source, TOWER) as replica:
        found = await asyncio.gather(
            *(encoded(replica, picture(number)) for number in (1, 2, 3, 4)), return_exceptions=True
        )
        for number, features in zip((1, 2, 3, 4), found, strict=True):
            if number == 3:
                assert isinstance(features, GenerationFailedError)
                assert "upside down" in str(features)
            else:
                assert torch.equal(features, rounded(picture(number)))
        assert sum(tower.encoded.count(3) for tower in towers) == 1


async def test_an_encoder_of_another_file_refuses_with_the_reason() -> None:
    async with (
        Pool(PretendTower()) as pool,
        pool_of(pool.source, TOWER, name=b"another") as replica,
    ):
        with pytest.raises(RequestError, match="same files"):
            await encoded(replica, picture(1))


async def test_a_cancelled_image_is_not_encoded() -> None:
    gate = threading.Semaphore(0)
    async with Pool(tower := PretendTower(gate=gate)) as pool:
        async with pool_of(pool.source, TOWER) as replica:
            first = asyncio.create_task(encoded(replica, picture(1)))
            await until(lambda: tower.entered.acquire(blocking=False))
            second = replica.submit(picture(2))
            await until(lambda: pool.waiting == 2)
            assert second.cancel()
            await until(lambda: pool.waiting == 1)
            gate.release(100)
            await first
            await encoded(replica, picture(3))
        assert tower.encoded == [1, 3]


async def test_closing_cancels_waiting_images() -> None:
    gate = threading.Semaphore(0)
    async with Pool(tower := PretendTower(gate=gate)) as pool:
        async with pool_of(pool.source, TOWER) as replica:
            waiting = replica.submit(picture(1))
            await until(lambda: tower.entered.acquire(blocking=False))
        with pytest.raises(CancelledError):
            waiting.result(HANG_S)
        gate.release(100)


async def test_an_engine_can_use_a_pool_as_its_encoder() -> None:
    async with (
        Pool(PretendTower(broken=frozenset([3]))) as pool,
        pool_of(pool.source, TOWER) as replica,
    ):
        store = FeatureStore(replica, budget_bytes=20 * 64)
        images = [picture(number) for number in (1, 2, 3)]
        failures = {}

        def all_ended() -> bool:
            failures.update(store.collect())
            store.provide([image for image in images if image.digest not in failures])
            return store.encoded == 2 and bool(failures)

        await until(all_ended)
        assert torch.equal(store.lookup(b"\1"), rounded(picture(1)))
        assert [*failures] == [b"\3"]
        assert str(failures[b"\3"]) == "ValueError: the picture is upside down"


def address_of(port: int) -> dict:
    return {"host": "h", "port": port, "token": "t"}


def encoders_of(calls: FakeCalls) -> DeploymentEncoders:
    return DeploymentEncoders(Replicas(calls), asyncio.get_running_loop())


async def test_the_encoders_of_a_deployment_are_the_replicas_that_answer() -> None:
    calls = FakeCalls({"a": address_of(1), "b": LOST, "c": address_of(2)})
    found = await encoders_of(calls).addresses()
    assert [address.port for address in found] == [1, 2] and calls.waits == 0


@pytest.mark.parametrize("answers", [{}, {"a": LOST}])
async def test_without_a_replica_the_next_one_is_awaited(answers) -> None:
    calls = FakeCalls(answers, next_answers={"b": address_of(3)})
    found = await encoders_of(calls).addresses()
    assert found == [Address("h", 3, "t")] and calls.waits == 1


async def test_an_image_fails_at_once_with_the_reason_if_no_encoder_could_be_loaded() -> None:
    """It would hold a place in the engine until its timeout."""
    refusal = ModelUnavailableError("no memory")
    calls = FakeCalls({"a": refusal}, next_answers={"a": refusal})
    async with pool_of(encoders_of(calls), TOWER) as pool:  # type: ignore[arg-type]
        with pytest.raises(ModelUnavailableError, match="no memory"):
            await encoded(pool, picture(1))
        async with Pool(TOWER) as loaded:
            calls.answers = {"b": asdict(loaded.source[0])}
            await encoded(pool, picture(1))


async def test_an_encoder_that_hangs_is_not_ranked_unless_all_hang() -> None:
    calls = FakeCalls({"a": address_of(1), "b": address_of(2)})
    ranking = EncoderRanking(encoders_of(calls))

    async def ports() -> set[int]:
        ranking.expire()
        ranked = asyncio.create_task(ranking.ranked(b"x"))
        await settled()
        await pass_time(ANSWER_TIMEOUT_S)
        return {each.port for each in await ranked}

    assert await ports() == {1, 2}
    calls.answers["a"] = asyncio.Event()
    assert await ports() == {2}
    calls.answers["b"] = asyncio.Event()
    assert await ports() == {2}, "the list before is kept"
    assert calls.waits == 0
