"""Replica sets over a fake handle and real streams: choice, load reports, lost replicas."""

import asyncio
import secrets
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from itertools import repeat
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from runtime.engine.engine_statistics import EngineStatistics
from runtime.engine.request import SamplingParams
from runtime.errors import ModelUnavailableError, OverloadedError, ReplicaLostError
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import ChatTask, RawText
from serve_app.routing.listing_router import ListingRouter
from serve_app.routing.load_reports import MAX_HASHES, LoadReporter, replica_load
from serve_app.routing.prefix_hashes import prefix_hashes_of
from serve_app.routing.prefix_memory import PrefixMemory
from serve_app.routing.replica_set import ReplicaSet
from serve_app.transport.client import StreamClient
from serve_app.transport.generation import generation_server
from serve_app.transport.load_watcher import LoadWatcher
from tests.patience import HANG_S, pass_time, settled, until
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica

IDLE = EngineStatistics(slots=8, tokens_per_s=1000.0, cacheable_tokens=100_000)


def task(name: str, tokens: int = 200) -> ChatTask:
    return ChatTask(
        name, "demo", RawText((f"{name} " * 4 * tokens)[: 4 * tokens]), SamplingParams()
    )


def busy(tokens: int) -> EngineStatistics:
    return EngineStatistics(
        slots=8, tokens_per_s=1000.0, cacheable_tokens=100_000, queued_tokens=tokens
    )


class RunningFake:
    """A running replica as Serve lists it."""

    def __init__(self, name: str, model: str = "m") -> None:
        self.model = model
        self.replica_id = SimpleNamespace(unique_id=name)
        self.statistics = IDLE
        self.replica = PretendReplica()
        self.reporter = LoadReporter(self.replica.generate, lambda: self.statistics)
        self.server = generation_server(
            self.reporter.generate, report=self.reporter.report, heartbeat_s=0.2
        )

    async def start(self) -> "RunningFake":
        address = await self.server.start("127.0.0.1")
        self.replica_metadata = asdict(replace(address, model=self.model))
        return self


class FakeRouter(ListingRouter):
    """The router of a deployment, without Serve."""

    app_name = "app"

    def __init__(self) -> None:
        self.running: dict[str, RunningFake] = {}

    @property
    def curr_replicas(self):
        return self.running


class FakeHandle:
    """The handle of a deployment whose router is initialised by the first reservation."""

    app_name = "app"

    def __init__(self, *replicas: RunningFake) -> None:
        self.deployment_name = secrets.token_hex(8)
        self.router = FakeRouter()
        self.replaced = asyncio.Event()
        self.reservations = 0
        self.replace(*replicas)

    def options(self, **_: str) -> "FakeHandle":
        return self

    def replace(self, *replicas: RunningFake) -> None:
        self.router.running = {each.replica_id.unique_id: each for each in replicas}
        self.replaced.set()

    @asynccontextmanager
    async def choose_replica(self):
        self.router.initialize_state(deployment=self.deployment_name)
        self.reservations += 1
        try:
            while not self.router.running:
                self.replaced.clear()
                await self.replaced.wait()
            yield
        finally:
            self.reservations -= 1


@asynccontextmanager
async def running(*names: str):
    replicas = [await RunningFake(name).start() for name in names]
    try:
        yield replicas
    finally:
        for replica in replicas:
            await replica.server.close(drain_s=0)


@asynccontextmanager
async def replica_set(handle: FakeHandle):
    made = ReplicaSet(handle)
    try:
        yield made
    finally:
        made.close()


async def chosen(known: ReplicaSet, asked: ChatTask, avoid: frozenset[str] = frozenset()) -> str:
    async with asyncio.timeout(HANG_S):
        return (await known.choose(asked, avoid=avoid)).replica


async def test_a_model_serves_while_a_replica_has_loaded_it():
    async with running("r1", "r2") as (loaded, unserved):
        handle = FakeHandle()
        async with replica_set(handle) as known:
            assert not known.serving
            handle.router.initialize_state(deployment=handle.deployment_name)
            assert not known.serving
            unserved.replica_metadata["model"] = ""
            handle.replace(unserved)
            assert not known.serving
            handle.replace(unserved, loaded)
            assert known.serving


async def test_the_next_turn_is_sent_to_the_same_replica():
    async with running("a", "b", "c") as replicas, replica_set(FakeHandle(*replicas)) as known:
        first = await chosen(known, task("x"))
        turns = [replace(task("x", 200 + 50 * n), id=f"{n}") for n in range(5)]
        assert {await chosen(known, turn) for turn in turns} == {first}


async def test_replicas_report_less_often_when_others_are_added(monkeypatch):
    monkeypatch.setattr("serve_app.routing.replica_set.REPORTS_PER_S", 10)
    intervals = {}

    class RecordedLoadWatcher(LoadWatcher):
        def __init__(self, address, report, lost, *, every_s):
            super().__init__(address, report, lost, every_s=every_s)
            intervals[address.replica] = every_s

    monkeypatch.setattr("serve_app.routing.replica_set.LoadWatcher", RecordedLoadWatcher)
    async with running("a", "b", "c", "d") as replicas:
        handle = FakeHandle(replicas[0])
        async with replica_set(handle) as known:
            await chosen(known, task("x"))
            assert intervals == {"a": 0.1}
            handle.replace(*replicas)
            await chosen(known, task("y"))
            assert intervals == dict.fromkeys("abcd", 0.4)
            replicas[0].statistics = busy(50_000)
            numbers = iter(range(10_000))

            async def avoided() -> bool:
                return "a" not in {
                    await chosen(known, task(f"{next(numbers)}", 10)) for _ in range(8)
                }

            await until(avoided)  # the reports of the new subscription arrive


async def test_a_replica_that_could_not_load_the_model_is_chosen_only_alone():
    async with running("a") as (a,):
        unserved = await RunningFake("b", model="").start()
        handle = FakeHandle(a, unserved)
        async with replica_set(handle) as known:
            assert {await chosen(known, task(f"{n}")) for n in range(9)} == {"a"}
            avoid = frozenset({"a"})
            assert {await chosen(known, task(f"{n}"), avoid) for n in range(9)} == {"a"}
            handle.replace(unserved)
            assert await chosen(known, task("x")) == "b"
        await unserved.server.close(drain_s=0)


async def test_another_model_is_chosen_to_continue_an_answer_only_alone():
    async with running("old", "new") as (old, new):
        new.replica_metadata["model"] = "another"
        handle = FakeHandle(old, new)
        async with replica_set(handle) as known:
            avoid = frozenset({"old"})
            addresses = [
                await known.choose(task(f"{n}"), avoid=avoid, identity="m") for n in range(9)
            ]
            assert {address.replica for address in addresses} == {"old"}
            handle.replace(new)
            assert (await known.choose(task("x"), identity="m")).replica == "new"


def test_a_report_has_the_share_of_the_pages_in_use():
    assert replica_load(EngineStatistics(pages_owned=30, pages_total=120)).memory == 0.25
    assert replica_load(EngineStatistics()).memory == 0


async def test_a_replica_set_records_prefixes_in_the_memory_of_its_ingress():
    async with running("a") as (a,):
        memory = PrefixMemory()
        known = ReplicaSet(FakeHandle(a), memory)
        await chosen(known, task("x"))
        assert memory.holders(prefix_hashes_of(task("x")), limit=1) == ["a"]
        known.close()


async def test_a_replica_that_reports_a_queue_is_not_chosen():
    async with running("a", "b") as (a, b), replica_set(FakeHandle(a, b)) as known:
        await chosen(known, task("first"))
        a.statistics = busy(50_000)
        numbers = iter(range(10_000))

        async def avoided() -> bool:
            return {await chosen(known, task(f"{next(numbers)}", 10)) for _ in range(8)} == {"b"}

        await until(avoided)


async def test_prompts_of_another_ingress_are_known_from_reports():
    async with running("a", "b", "c", "d") as replicas:
        handle = FakeHandle(*replicas)
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        async with replica_set(handle) as there:
            talks = {f"talk {n}": await chosen(there, task(f"talk {n}")) for n in range(6)}
        for name, replica in talks.items():
            await first_delta(by_name[replica].reporter, name)

        async def known() -> bool:
            """To a new replica set, which knows the prompts from reports only."""
            async with replica_set(handle) as here:
                await chosen(here, task("first"))
                await settled()
                return talks == {name: await chosen(here, task(name, 260)) for name in talks}

        await until(known)


async def test_a_dead_replica_is_skipped_before_serve_removes_it():
    """And before its silence counts, because its connection breaks."""
    async with running("a", "b") as (a, b), replica_set(FakeHandle(a, b)) as known:
        await both_chosen(known)
        await a.server.close(drain_s=0)
        await settled()
        assert await only_chosen(known, "b")


async def test_a_draining_replica_is_skipped():
    async with running("a", "b") as (a, b), replica_set(FakeHandle(a, b)) as known:
        await both_chosen(known)
        client = StreamClient()
        a.replica.waits.clear()
        address = await known.choose(task("x"), avoid=frozenset({"b"}))
        answer = client.generate(address, task("x"))
        await anext(answer)
        closing = asyncio.create_task(a.server.close(drain_s=60.0))
        await settled()
        assert await only_chosen(known, "b")
        assert not closing.done()
        await answer.aclose()
        await closing
        client.close()


async def both_chosen(known: ReplicaSet) -> None:
    """Returns when both have reported: the first choice connects to them."""
    assert {await chosen(known, task(f"{n}")) for n in range(8)} == {"a", "b"}
    await settled()


async def only_chosen(known: ReplicaSet, name: str) -> bool:
    """For new prompts, which both would get otherwise."""
    asked = [await chosen(known, task(f"{number}", 10)) for number in range(12)]
    return set(asked) == {name}


async def test_replicas_follow_the_list_of_serve():
    async with running("a", "b") as (a, b):
        handle = FakeHandle(a)
        async with replica_set(handle) as known:
            assert await chosen(known, task("x")) == "a"
            handle.replace(b)
            assert await chosen(known, task("x")) == "b"
            handle.replace(a, b)
            counts = Counter([await chosen(known, task(f"{n}")) for n in range(10)])
            assert set(counts) == {"a", "b"}


async def test_some_queued_requests_move_to_a_replica_that_starts_later():
    """The new replica is found although no new request arrives."""
    async with running("a", "b") as (a, b):
        handle = FakeHandle(a)
        async with replica_set(handle) as known:
            waiting = [task(f"{n}", 5000) for n in range(10)]
            assert {await chosen(known, each) for each in waiting} == {"a"}
            a.statistics = busy(50_000)
            assert [await known.choose_earlier(each) for each in waiting] == [None] * 10
            handle.replace(a, b)
            moved: list[str] = []

            async def some() -> bool:
                moves = [await known.choose_earlier(each) for each in waiting]
                moved.extend(address.replica for address in moves if address is not None)
                return bool(moved)

            await until(some)
            assert set(moved) == {"b"} and 2 <= len(moved) <= 5, "both queues are about equal then"


async def test_requests_reserve_a_replica_while_there_is_none():
    async with running("a") as (a,):
        handle = FakeHandle()
        async with replica_set(handle) as known:
            waiting = [asyncio.create_task(chosen(known, task(f"{n}"))) for n in range(3)]
            left = asyncio.create_task(chosen(known, task("left")))

            async def reserved() -> bool:
                return handle.reservations == 4

            await until(reserved)
            left.cancel()
            await asyncio.wait({left})
            assert handle.reservations == 3
            handle.replace(a)
            assert await asyncio.gather(*waiting) == ["a"] * 3
            assert handle.reservations == 0


async def test_no_reservation_is_made_while_replicas_are_listed():
    async with running("a", "b") as (a, b):
        handle = FakeHandle(a, b)
        async with replica_set(handle) as known:
            await chosen(known, task("first"))
            handle.choose_replica = pytest.fail
            for n in range(20):
                await chosen(known, task(f"{n}"))


async def test_a_replica_that_serve_found_dead_is_not_chosen():
    """Serve removes it from its list before it has a new list."""
    async with running("a", "b") as (a, b):
        handle = FakeHandle(a, b)
        async with replica_set(handle) as known:
            await both_chosen(known)
            del handle.router.running["a"]
            assert await only_chosen(known, "b")


class AnsweringHandle(FakeHandle):
    """Its replicas, which are listed from the beginning, give one of `answers` at each call."""

    def __init__(self, *answers) -> None:
        super().__init__(RunningFake("a"), RunningFake("b"))
        self.router.initialize_state(deployment=self.deployment_name)
        self.answers = iter(answers)

    async def remote(self, verbose: bool) -> ModelCard:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_model_is_described_by_another_replica_if_one_dies():
    errors = ActorDiedError(), ActorUnavailableError("", bytes(16)), ActorDiedError()
    known = ReplicaSet(AnsweringHandle(*errors, CARD))
    async with asyncio.timeout(HANG_S):
        assert await known.describe(verbose=False) == CARD
        assert await known.describe(verbose=False) == CARD, "from the cache"


async def test_replicas_that_stay_lost_while_serve_lists_them_are_given_up():
    known = ReplicaSet(AnsweringHandle(*repeat(ActorDiedError(), 100_000)))
    describing = asyncio.create_task(known.describe(verbose=False))
    await settled()
    while not describing.done():
        await pass_time(1)
    with pytest.raises(ReplicaLostError):
        await describing


async def test_a_model_is_described_by_a_replica_that_has_loaded_it():
    error = ModelUnavailableError("it does not fit")
    assert await ReplicaSet(AnsweringHandle(error, CARD)).describe(verbose=False) == CARD
    with pytest.raises(ModelUnavailableError, match="does not fit"):
        await ReplicaSet(AnsweringHandle(error, error)).describe(verbose=False)


async def test_the_first_replica_is_awaited_to_describe_a_model():
    handle = AnsweringHandle(CARD)
    replicas = [*handle.router.running.values()]
    handle.replace()
    describing = asyncio.create_task(ReplicaSet(handle).describe(verbose=False))
    await settled()
    assert not describing.done() and handle.reservations == 1
    handle.replace(*replicas)
    assert await describing == CARD


async def first_delta(reporter: LoadReporter, name: str) -> None:
    async with aclosing(reporter.generate(task(name))) as deltas:
        await anext(deltas)


async def test_a_prompt_is_reported_once_its_answer_begins():
    replica = PretendReplica()
    reporter = LoadReporter(replica.generate, lambda: busy(7))
    replica.error = OverloadedError("full")
    with pytest.raises(OverloadedError):
        await first_delta(reporter, "a")
    assert reporter.report(0).hashes == ()
    replica.error = None
    async with aclosing(reporter.generate(task("a"))) as deltas:
        assert len([delta async for delta in deltas]) > 1
    assert reporter.report(0).hashes == (prefix_hashes_of(task("a")),)


async def test_the_first_report_has_recent_prompts_and_later_ones_the_new():
    reporter = LoadReporter(PretendReplica().generate, lambda: busy(7))
    for n in range(MAX_HASHES + 10):
        await first_delta(reporter, f"{n}")
    first = reporter.report(0)
    assert first.load.queued_tokens == 7
    expected = [prefix_hashes_of(task(f"{n}")) for n in range(10, MAX_HASHES + 10)]
    assert list(first.hashes) == expected
    assert reporter.report(first.recorded).hashes == ()
    await first_delta(reporter, "new")
    assert reporter.report(first.recorded).hashes == (prefix_hashes_of(task("new")),)
