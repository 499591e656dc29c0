"""Crowds of replicas behind a pretend handle and real streams: who is asked, who is known."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from runtime.engine.engine import EngineStatistics
from runtime.engine.request import SamplingParams
from serve_app.gateway.tasks import ChatTask, RawText
from serve_app.routing.load_reports import CHAINS_KEPT, Reporter
from serve_app.routing.prefix_hashes import prefix_hashes_of
from serve_app.routing.replica_set import HandleDirectory, ListingRouter, ReplicaSet
from serve_app.transport.client import StreamClient
from serve_app.transport.server import StreamServer
from tests.patience import HANG_S
from tests.unit.serve_app.pretend import CARD, PretendReplica

IDLE = EngineStatistics(slots=8, tokens_per_s=1000.0, cacheable_tokens=100_000)
NEWS_S = 0.5  # until what happened is heard of; silence would tell after 5 s


def task(name: str, tokens: int = 200) -> ChatTask:
    return ChatTask(
        name, "demo", RawText((f"{name} " * 4 * tokens)[: 4 * tokens]), SamplingParams()
    )


def busy(tokens: int) -> EngineStatistics:
    return EngineStatistics(
        slots=8, tokens_per_s=1000.0, cacheable_tokens=100_000, queued_tokens=tokens
    )


class Running:
    """A replica as Serve would have it."""

    def __init__(self, name: str) -> None:
        self.replica_id = SimpleNamespace(unique_id=name)
        self.statistics = IDLE
        self.replica = PretendReplica()
        self.reporter = Reporter(self.replica.generate, lambda: self.statistics)
        self.server = StreamServer(
            self.reporter.generate, report=self.reporter.report, heartbeat_s=0.2
        )

    async def start(self) -> "Running":
        self.replica_metadata = asdict(await self.server.start("127.0.0.1"))
        return self


class PretendHandle:
    """What a crowd uses of Serve's handle, with Serve's router behind it."""

    def __init__(self, *replicas: Running) -> None:
        self.replicas = list(replicas)
        self.there = asyncio.Event()
        self.knocks = 0
        self.router = object.__new__(ListingRouter)

    def become(self, *replicas: Running) -> None:
        self.replicas = list(replicas)
        self.there.set()

    @asynccontextmanager
    async def choose_replica(self, *, census, _reserve):
        assert _reserve is False
        while not self.replicas:
            self.there.clear()
            await self.there.wait()
        pending = SimpleNamespace(
            kwargs={"census": census}, routing_context=SimpleNamespace(should_backoff=False)
        )
        ranks = await self.router.choose_replicas(self.replicas, pending)
        yield ranks[0][0]

    def remote(self):
        self.knocks += 1
        return SimpleNamespace(cancel=self._leave)

    def _leave(self) -> None:
        self.knocks -= 1


@asynccontextmanager
async def running(*names: str):
    replicas = [await Running(name).start() for name in names]
    try:
        yield replicas
    finally:
        for replica in replicas:
            await replica.server.close(drain_s=0)


@asynccontextmanager
async def crowd(handle: PretendHandle):
    made = ReplicaSet(handle)
    try:
        yield made
    finally:
        made.close()


async def chosen(crowd: ReplicaSet, asked: ChatTask, avoid: frozenset[str] = frozenset()) -> str:
    async with asyncio.timeout(HANG_S):
        return (await crowd.choose(asked, avoid)).replica


async def eventually(holds) -> None:
    async with asyncio.timeout(HANG_S):
        while not await holds():
            await asyncio.sleep(0.02)


async def test_the_next_turn_goes_to_the_same_address():
    async with running("a", "b", "c") as replicas, crowd(PretendHandle(*replicas)) as known:
        first = await chosen(known, task("x"))
        assert {await chosen(known, task("x", 200 + 50 * n)) for n in range(5)} == {first}


async def test_a_replica_that_reports_a_queue_is_avoided():
    async with running("a", "b") as (a, b), crowd(PretendHandle(a, b)) as known:
        await chosen(known, task("first"))
        a.statistics = busy(50_000)
        numbers = iter(range(10_000))

        async def avoided() -> bool:
            return {await chosen(known, task(f"{next(numbers)}", 10)) for _ in range(8)} == {"b"}

        await eventually(avoided)


async def test_what_came_through_another_ingress_is_known_here():
    async with running("a", "b", "c", "d") as replicas:
        handle = PretendHandle(*replicas)
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        async with crowd(handle) as there:
            talks = {f"talk {n}": await chosen(there, task(f"talk {n}")) for n in range(6)}
        for name, replica in talks.items():
            by_name[replica].reporter.generate(task(name))
        pause_s = 0.1

        async def known() -> bool:
            """To one that has just come, so it has what it knows from reports alone."""
            nonlocal pause_s
            pause_s *= 2
            async with crowd(handle) as here:
                await chosen(here, task("first"))
                await asyncio.sleep(pause_s)
                return talks == {name: await chosen(here, task(name, 260)) for name in talks}

        await eventually(known)


async def test_a_dead_replica_is_passed_over_before_serve_knows():
    """Before its silence tells, too: what tells is that its connection breaks."""
    async with running("a", "b") as (a, b), crowd(PretendHandle(a, b)) as known:
        await both_chosen(known)
        await a.server.close(drain_s=0)
        await asyncio.sleep(NEWS_S)
        assert await only_chosen(known, "b")


async def test_a_replica_that_drains_is_passed_over():
    async with running("a", "b") as (a, b), crowd(PretendHandle(a, b)) as known:
        await both_chosen(known)
        client = StreamClient()
        a.replica.waits.clear()
        address = await known.choose(task("x"), frozenset({"b"}))
        answer = client.generate(address, task("x"))
        await anext(answer)
        closing = asyncio.create_task(a.server.close(drain_s=60.0))
        await asyncio.sleep(NEWS_S)
        assert await only_chosen(known, "b")
        assert not closing.done()
        await answer.aclose()
        await closing
        client.close()


async def both_chosen(known: ReplicaSet) -> None:
    """And both are heard of: choosing has made the connections."""
    assert {await chosen(known, task(f"{n}")) for n in range(8)} == {"a", "b"}
    await asyncio.sleep(NEWS_S)


async def only_chosen(known: ReplicaSet, name: str) -> bool:
    """For prompts that nobody holds, which both would be given."""
    asked = [await chosen(known, task(f"{number}", 10)) for number in range(12)]
    return set(asked) == {name}


async def test_replicas_that_serve_no_longer_has_are_forgotten_and_new_ones_used():
    async with running("a", "b") as (a, b):
        handle = PretendHandle(a)
        async with crowd(handle) as known:
            assert await chosen(known, task("x")) == "a"
            handle.become(b)
            assert await chosen(known, task("x")) == "b"
            handle.become(a, b)
            counts = Counter([await chosen(known, task(f"{n}")) for n in range(10)])
            assert set(counts) == {"a", "b"}


async def test_of_those_that_wait_some_go_to_a_replica_that_is_started_later():
    """Though nobody else asks meanwhile, so that nothing but their waiting makes it known."""
    async with running("a", "b") as (a, b):
        handle = PretendHandle(a)
        async with crowd(handle) as known:
            waiting = [task(f"{n}", 5000) for n in range(10)]
            assert {await chosen(known, each) for each in waiting} == {"a"}
            a.statistics = busy(50_000)
            assert [await known.better(each, frozenset()) for each in waiting] == [None] * 10
            handle.become(a, b)
            moved: list[str] = []

            async def some() -> bool:
                moves = [await known.better(each, frozenset()) for each in waiting]
                moved.extend(address.replica for address in moves if address is not None)
                return bool(moved)

            await eventually(some)
            assert set(moved) == {"b"} and 2 <= len(moved) <= 5, "both have about as much then"


async def test_while_there_is_no_replica_each_request_knocks_and_is_answered_in_the_end():
    async with running("a") as (a,):
        handle = PretendHandle()
        async with crowd(handle) as known:
            waiting = [asyncio.create_task(chosen(known, task(f"{n}"))) for n in range(3)]
            left = asyncio.create_task(chosen(known, task("left")))

            async def knocked() -> bool:
                return handle.knocks == 4

            await eventually(knocked)
            left.cancel()
            await asyncio.wait({left})
            assert handle.knocks == 3
            handle.become(a)
            assert await asyncio.gather(*waiting) == ["a"] * 3
            assert handle.knocks == 0


async def test_where_replicas_are_nobody_knocks():
    async with running("a") as (a,):
        handle = PretendHandle(a)
        handle.remote = pytest.fail
        async with crowd(handle) as known:
            for n in range(20):
                await chosen(known, task(f"{n}"))


async def test_who_dies_while_a_model_is_described_leaves_that_to_another():
    answers = iter([ActorDiedError(), ActorUnavailableError("", bytes(16)), CARD])

    class Dying:
        def options(self, *, method_name):
            assert method_name == "describe"
            return self

        async def remote(self, *, verbose):
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    directory = HandleDirectory({"demo": Dying()})
    async with asyncio.timeout(HANG_S):
        assert await directory.describe("demo", verbose=False) == CARD
        assert await directory.describe("demo", verbose=False) == CARD


async def test_calls_for_control_go_to_two_at_random_and_then_to_all():
    router = object.__new__(ListingRouter)
    pending = SimpleNamespace(kwargs={}, routing_context=SimpleNamespace(should_backoff=False))
    replicas = list("abcdef")
    ranks = [await router.choose_replicas(replicas, pending) for _ in range(100)]
    assert all(len(rank[0]) == 2 and rank[1] == replicas for rank in ranks)
    assert {name for rank in ranks for name in rank[0]} == set(replicas)
    assert pending.routing_context.should_backoff
    assert await router.choose_replicas(["a"], None) == [["a"], ["a"]]


def test_a_newcomer_is_told_of_the_latest_tasks_and_then_of_new_ones():
    reporter = Reporter(PretendReplica().generate, lambda: busy(7))
    for n in range(CHAINS_KEPT + 10):
        reporter.generate(task(f"{n}"))
    first = reporter.report(0)
    assert first.load.queued_tokens == 7
    expected = [prefix_hashes_of(task(f"{n}")) for n in range(10, CHAINS_KEPT + 10)]
    assert list(first.chains) == expected
    assert reporter.report(first.taken).chains == ()
    reporter.generate(task("new"))
    assert reporter.report(first.taken).chains == (prefix_hashes_of(task("new")),)
