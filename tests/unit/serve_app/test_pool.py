"""A pool of encoders as an engine sees it: which is asked, and what happens when it is lost."""

import asyncio
import threading
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import torch

from runtime.errors import GenerationFailedError, RequestError
from runtime.vision.feature_cache import FeatureStore
from serve_app.transport.feature_server import FeatureServer
from serve_app.transport.wire import Address
from serve_app.vision.encoder import EncoderReplica
from serve_app.vision.encoder_choice import EncoderDirectory, KnownEncoders
from tests.patience import HANG_S, until
from tests.unit.runtime.vision import PretendTower, picture
from tests.unit.serve_app.encoding import (
    HASTY,
    Encoders,
    encoded,
    encoder_of,
    pool_of,
    rounded,
    served,
)

TOWER = PretendTower()
NOBODY = Address("127.0.0.1", 9, "token")  # the port for what is thrown away


class Pool:
    """So many encoders with a tower each, and a directory of them."""

    def __init__(self, *towers: PretendTower) -> None:
        self.towers = list(towers)
        self.directory = Encoders()
        self.encoders: list[EncoderReplica] = []
        self.servers: list[FeatureServer] = []
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "Pool":
        for tower in self.towers:
            await self.add(tower)
        return self

    async def __aexit__(self, *_) -> None:
        await self._opened.aclose()

    async def add(self, tower: PretendTower) -> None:
        encoder = encoder_of(tower)
        server, address = await self._opened.enter_async_context(served(encoder))
        self.encoders.append(encoder)
        self.servers.append(server)
        self.directory.append(address)

    async def first(self, digest: bytes) -> int:
        """The number of the encoder that is asked first."""
        known = KnownEncoders(self.directory)
        return self.directory.index((await known.ranked(digest))[0])

    @property
    def waiting(self) -> int:
        """Images at all encoders, those that are being encoded among them."""
        return sum(encoder.statistics().images_waiting for encoder in self.encoders)

    @property
    def encoded(self) -> list[list[int]]:
        return [tower.encoded for tower in self.towers]


async def test_replicas_share_what_one_of_them_has_had_encoded() -> None:
    async with Pool(*(PretendTower() for _ in range(3))) as pool:
        async with pool_of(pool.directory, TOWER) as one, pool_of(pool.directory, TOWER) as two:
            for image in map(picture, range(1, 13)):
                for replica in (one, two, one):
                    assert torch.equal(await encoded(replica, image), rounded(image))
        numbers = [number for tower in pool.encoded for number in tower]
        assert sorted(numbers) == list(range(1, 13))
        assert all(pool.encoded), "every encoder has its part"
        assert one.weight_bytes == 0 and one.workspace_bytes == 2 * 8 * 16 * 2


async def test_an_encoder_that_comes_or_goes_moves_its_own_images_alone() -> None:
    addresses = [Address("10.0.0.1", port, "t") for port in range(5)]
    digests = [bytes([number]) for number in range(200)]

    async def firsts(known: list[Address]) -> list[Address]:
        encoders = KnownEncoders(Encoders(known))
        return [(await encoders.ranked(digest))[0] for digest in digests]

    all_five, four = await firsts(addresses), await firsts(addresses[:-1])
    for before, after in zip(all_five, four, strict=True):
        assert after == before or before == addresses[-1]
    assert all(20 < all_five.count(address) < 60 for address in addresses)


async def test_a_dead_encoder_is_passed_over_and_not_asked_again_soon(monkeypatch) -> None:
    tower = PretendTower()
    async with Pool(tower) as pool:
        pool.directory.append(NOBODY)
        numbers = [n for n in range(1, 40) if await pool.first(bytes([n])) == 1][:5]
        opened = count_connections(monkeypatch)
        async with pool_of(pool.directory, TOWER) as replica:
            for number in numbers:
                found = await encoded(replica, picture(number))
                assert torch.equal(found, rounded(picture(number)))
        assert tower.encoded == numbers and opened.count(NOBODY) == 1


def count_connections(monkeypatch) -> list[Address]:
    from serve_app.transport.line import Line

    opened: list[Address] = []
    open_line = Line.open

    async def noted(address, **options):
        opened.append(address)
        return await open_line(address, **options)

    monkeypatch.setattr(Line, "open", noted)
    return opened


async def test_an_encoder_that_ends_with_an_image_in_flight_is_replaced_by_another() -> None:
    gate = threading.Semaphore(0)
    async with Pool(PretendTower(gate=gate), PretendTower(gate=gate)) as pool:
        async with pool_of(pool.directory, TOWER) as replica:
            number, *_ = [n for n in range(1, 40) if await pool.first(bytes([n])) == 0]
            image = picture(number)
            asked = asyncio.create_task(encoded(replica, image))
            await until(lambda: pool.towers[0].entered.acquire(blocking=False))
            await pool.servers[0].close(drain_s=0)
            await until(lambda: pool.towers[1].entered.acquire(blocking=False))
            gate.release(100)
            assert torch.equal(await asked, rounded(image))
        assert pool.encoded == [[number], [number]]


async def test_an_encoder_that_falls_silent_is_replaced_by_another() -> None:
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1")
    hung = Address("127.0.0.1", server.sockets[0].getsockname()[1], "token")
    async with Pool(tower := PretendTower()) as pool:
        pool.directory.append(hung)
        number, *_ = [n for n in range(1, 40) if await pool.first(bytes([n])) == 1]
        async with pool_of(pool.directory, TOWER, rules=replace(HASTY, patience_s=0.3)) as replica:
            found = await encoded(replica, picture(number))
        assert torch.equal(found, rounded(picture(number))) and tower.encoded == [number]
    server.close()


async def test_a_dead_tower_sends_its_images_elsewhere() -> None:
    class Dead(PretendTower):
        def encode(self, pixels, grid):
            raise torch.AcceleratorError("unspecified launch failure")

    async with Pool(Dead(), PretendTower()) as pool, pool_of(pool.directory, TOWER) as replica:
        for image in map(picture, range(1, 9)):
            assert torch.equal(await encoded(replica, image), rounded(image))


async def test_an_encoder_that_is_started_later_is_found() -> None:
    async with Pool() as pool, pool_of(pool.directory, TOWER) as replica:
        asked = [asyncio.create_task(encoded(replica, picture(n))) for n in (1, 2)]
        await until(lambda: pool.directory.asked > 3)
        await pool.add(PretendTower())
        for number, task in zip((1, 2), asked, strict=True):
            assert torch.equal(await task, rounded(picture(number)))


async def test_with_no_encoder_the_image_fails_in_time_and_says_why() -> None:
    rules = replace(HASTY, timeout_s=0.3)
    async with pool_of(Encoders([NOBODY]), TOWER, rules=rules) as replica:
        with pytest.raises(GenerationFailedError, match=r"within 0\.3 seconds.*No|refused|broken"):
            await encoded(replica, picture(1))
    async with pool_of(Encoders(), TOWER, rules=rules) as replica:
        with pytest.raises(GenerationFailedError, match="no vision encoder has given"):
            await encoded(replica, picture(1))


async def test_an_image_that_ends_encoders_is_given_up_and_the_others_go_on() -> None:
    """As when its encoding crashes the process: the connection breaks once the pixels are there."""

    class Deadly(PretendTower):
        def encode(self, pixels, grid):
            if int(pixels[0, 0]) == 7:
                self.batches.append([7])
                loop.call_soon_threadsafe(self.cut)
                self.over.wait(HANG_S)
            return super().encode(pixels, grid)

    loop = asyncio.get_running_loop()
    towers = [Deadly() for _ in range(5)]
    async with Pool(*towers) as pool, pool_of(pool.directory, TOWER) as replica:
        for tower, server in zip(towers, pool.servers, strict=True):
            tower.over = threading.Event()
            tower.cut = lambda server=server: [caller.cancel() for caller in server._callers]
        with pytest.raises(GenerationFailedError, match="3 vision encoders were lost"):
            await encoded(replica, picture(7))
        for tower in towers:
            tower.over.set()
        assert sum(tower.encoded.count(7) for tower in towers) >= 3
        for number in range(8, 16):
            found = await encoded(replica, picture(number))
            assert torch.equal(found, rounded(picture(number)))


async def test_a_poisoned_image_is_tried_on_one_encoder_and_fails_alone() -> None:
    towers = [PretendTower(broken=frozenset([3])) for _ in range(2)]
    async with Pool(*towers) as pool, pool_of(pool.directory, TOWER) as replica:
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


async def test_an_encoder_of_another_file_is_refused_in_words() -> None:
    async with (
        Pool(PretendTower()) as pool,
        pool_of(pool.directory, TOWER, name=b"another") as replica,
    ):
        with pytest.raises(RequestError, match="same files"):
            await encoded(replica, picture(1))


async def test_a_cancelled_image_is_not_encoded() -> None:
    gate = threading.Semaphore(0)
    async with Pool(tower := PretendTower(gate=gate)) as pool:
        async with pool_of(pool.directory, TOWER) as replica:
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


async def test_closing_ends_what_waits() -> None:
    gate = threading.Semaphore(0)
    async with Pool(tower := PretendTower(gate=gate)) as pool:
        async with pool_of(pool.directory, TOWER) as replica:
            waiting = replica.submit(picture(1))
            await until(lambda: tower.entered.acquire(blocking=False))
        with pytest.raises(CancelledError):
            waiting.result(HANG_S)
        gate.release(100)


async def test_an_engines_store_takes_features_of_a_pool_as_of_any_encoder() -> None:
    async with (
        Pool(PretendTower(broken=frozenset([3]))) as pool,
        pool_of(pool.directory, TOWER) as replica,
    ):
        store = FeatureStore(replica, budget_bytes=20 * 64)
        images = [picture(number) for number in (1, 2, 3)]
        failures = {}
        async with asyncio.timeout(HANG_S):
            while not (store.encoded == 2 and failures):
                store.provide([image for image in images if image.digest not in failures])
                await asyncio.sleep(0.01)
                failures |= store.collect()
        assert torch.equal(store.lookup(b"\1"), rounded(picture(1)))
        assert failures == {b"\3": "ValueError: the picture is upside down"}


class Handle:
    """What a Serve handle does for the directory, without Serve."""

    def __init__(self, *answers) -> None:
        self.answers = answers
        self.chosen = 0

    def broadcast(self, method_name: str) -> "Handle":
        assert method_name == "address"
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list:
        if not self.answers:
            raise RuntimeError("the deployment is unavailable")
        if isinstance(self.answers[0], TimeoutError):
            raise self.answers[0]
        return list(self.answers)

    def choose_replica(self, *, _reserve: bool) -> "Handle":
        return self

    async def __aenter__(self) -> "Handle":
        self.chosen += 1
        self.replica_metadata = {"host": "h", "port": 3, "token": "t"}
        return self

    async def __aexit__(self, *_) -> None:
        pass


def told(port: int) -> dict:
    return {"host": "h", "port": port, "token": "t"}


async def test_the_handles_replicas_are_those_that_answer() -> None:
    loop = asyncio.get_running_loop()
    handle = Handle(told(1), RuntimeError("dead"), told(2))
    found = await EncoderDirectory(handle, loop).addresses()
    assert [address.port for address in found] == [1, 2] and handle.chosen == 0


@pytest.mark.parametrize("answers", [(), (RuntimeError("dead"),)])
async def test_where_no_replica_runs_the_next_one_is_waited_for(answers) -> None:
    handle = Handle(*answers)
    found = await EncoderDirectory(handle, asyncio.get_running_loop()).addresses()
    assert found == [Address("h", 3, "t")] and handle.chosen == 1


async def test_a_directory_that_fails_leaves_what_was_known() -> None:
    handle = Handle(told(1), told(2))
    known = KnownEncoders(EncoderDirectory(handle, asyncio.get_running_loop()))
    before = await known.ranked(b"x")
    handle.answers = (TimeoutError(),)
    known.forget()
    assert await known.ranked(b"x") == before and len(before) == 2 and handle.chosen == 0
