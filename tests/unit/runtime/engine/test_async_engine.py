"""Streams from the engine's thread to asyncio; leaving one aborts its request."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from runtime.engine import async_engine
from runtime.engine.async_engine import STATISTICS_NS, AsyncEngine
from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.request import Delta, FinishReason, GenerationRequest, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.errors import EngineDeadError, OverloadedError, PromptTooLongError
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_manager import KVCacheManager
from tests.patience import HANG_S, until
from tests.thread_counts import torch_threads
from tests.unit.runtime.engine.fake_runner import VOCABULARY, PretendRunner, answer
from tests.unit.runtime.engine.test_engine import LIMITS, token_bytes


def engine_of(
    runner: PretendRunner | None = None, limits: EngineLimits = LIMITS, **options
) -> AsyncEngine:
    scheduler = Scheduler(KVCacheManager([Full()], [64], page_tokens=4), slots=4, step_tokens=16)
    return AsyncEngine(
        Engine(
            scheduler, runner or PretendRunner(), token_bytes=token_bytes, limits=limits, depth=2
        ),
        **options,
    )


@contextlib.contextmanager
def started(engine: AsyncEngine) -> Iterator[AsyncEngine]:
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def running(runner: PretendRunner | None = None, limits: EngineLimits = LIMITS, **options):
    return started(engine_of(runner, limits, **options))


def request(name: str, count: int = 20, tenant: str = "") -> GenerationRequest:
    return GenerationRequest(name, (1, 2, len(name)), StopRules(count), tenant=tenant)


async def collect(engine: AsyncEngine, one: GenerationRequest) -> Delta:
    merged = Delta()
    async with contextlib.aclosing(engine.stream(one)) as deltas:
        async for delta in deltas:
            merged = merged.merged(delta)
    return merged


async def test_output_wakes_an_event_loop_once_until_it_runs(monkeypatch) -> None:
    steps, enough = [], threading.Event()

    def count() -> None:
        steps.append(1)
        if len(steps) == 4:
            enough.set()

    loop, calls = asyncio.get_running_loop(), []
    with running(PretendRunner(count)) as engine:
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda f: (calls.append(f), call(f)))
        reads = [asyncio.ensure_future(collect(engine, request("x" * n))) for n in range(1, 5)]
        await asyncio.sleep(0)
        assert enough.wait(HANG_S) and len(calls) == 1  # meanwhile the loop does not run
        assert all(len(delta.tokens) == 20 for delta in await asyncio.gather(*reads))


def test_nothing_is_kept_for_an_event_loop_that_was_closed_before_it_ran() -> None:
    loop, stream = asyncio.new_event_loop(), async_engine._PendingDelta()
    outbox, kept = async_engine._Outbox(loop), weakref.ref(stream)
    for close in (loop.close, lambda: None):
        outbox.put(stream, Delta("text", (1,)))
        outbox.send()
        close()
    del stream
    assert kept() is None


async def test_a_busy_engine_counts_its_sequences_at_intervals(monkeypatch) -> None:
    monkeypatch.setattr(async_engine.time, "monotonic_ns", lambda: STATISTICS_NS)
    with running() as engine:
        counted = []
        count = engine._engine.statistics
        monkeypatch.setattr(engine._engine, "statistics", lambda: (counted.append(1), count())[1])
        await collect(engine, request("x", count=60))
        await until(lambda: engine.statistics().running == 0)
        assert engine.statistics().steps_total >= 60
        assert len(counted) < 10


async def test_many_streams_at_once_get_their_own_tokens() -> None:
    with running() as engine:
        names = ["x" * n for n in range(1, 9)]
        results = await asyncio.gather(*[collect(engine, request(n)) for n in names])
        for name, delta in zip(names, results, strict=True):
            assert list(delta.tokens) == answer((1, 2, len(name)), 20)
            assert delta.finish is FinishReason.LENGTH


def test_the_loop_computes_with_the_threads_of_where_the_engine_was_created() -> None:
    counts: list[int] = []
    runner = PretendRunner(lambda: counts.append(torch.get_num_threads()))
    with torch_threads(3):
        engine = engine_of(runner)
        with torch_threads(1), started(engine):  # another model, or work without one
            asyncio.run(collect(engine, request("x")))
    assert set(counts) == {3}


async def test_one_request_too_many_is_refused_and_the_others_continue() -> None:
    gate = threading.Semaphore(0)
    with running(PretendRunner(gate.acquire)) as engine:
        tasks = [asyncio.create_task(collect(engine, request("x" * n))) for n in range(1, 9)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await collect(engine, request("more"))
        gate.release(1000)
        for delta in await asyncio.gather(*tasks):
            assert delta.finish is FinishReason.LENGTH
        assert (await collect(engine, request("more"))).finish is FinishReason.LENGTH


async def test_528_requests_of_one_tenant_delay_another_until_a_slot_is_free() -> None:
    """Those beyond the tenant's share of the queue are refused; the other tenant is not."""
    gate = threading.Semaphore(0)
    limits = EngineLimits(64, VOCABULARY, max_live=4 + 524, slots=4)
    ended: list[str] = []

    async def ask(engine: AsyncEngine, name: str, tenant: str) -> bool:
        try:
            await collect(engine, request(name, 8, tenant))
        except OverloadedError:
            return False
        ended.append(tenant)
        return True

    with running(PretendRunner(gate.acquire), limits) as engine:
        flood = [
            asyncio.create_task(ask(engine, f"flood {number}", "flood")) for number in range(528)
        ]
        await asyncio.sleep(0)
        other = asyncio.create_task(ask(engine, "other", "other"))
        await asyncio.sleep(0)
        gate.release(10_000)
        assert await other
        assert sum(await asyncio.gather(*flood)) == 4 + 262
    assert ended.index("other") <= 2 * 4, "at most those that ran before, and those beside it"


async def test_leaving_a_stream_frees_its_slot_and_pages() -> None:
    gate = threading.Semaphore(6)
    with running(PretendRunner(gate.acquire)) as engine:
        async with contextlib.aclosing(engine.stream(request("a", 50))) as deltas:
            async for delta in deltas:
                assert delta.finish is None
                break
        for _ in range(100):
            gate.release()
        await until(lambda: engine.statistics().running == 0)
        assert engine.statistics().pages_owned == 0
        assert (await collect(engine, request("b"))).finish is FinishReason.LENGTH


async def test_a_tenant_still_has_its_other_streams_when_it_leaves_one() -> None:
    gate = threading.Semaphore(0)
    limits = replace(LIMITS, max_live=4, slots=0)
    with running(PretendRunner(gate.acquire), limits) as engine:
        reads = [asyncio.create_task(collect(engine, request("x" * n, tenant="a"))) for n in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            engine.check_room("a")
        reads[0].cancel()
        await asyncio.wait(reads[:1])
        engine.check_room("a")
        reads.append(asyncio.create_task(collect(engine, request("xxx", tenant="a"))))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            engine.check_room("a")
        gate.release(100)
        await asyncio.gather(*reads[1:])


async def test_a_slow_reader_gets_one_merged_delta() -> None:
    gate = threading.Semaphore(1)
    with running(PretendRunner(gate.acquire)) as engine:
        async with contextlib.aclosing(engine.stream(request("a"))) as deltas:
            first = await anext(deltas)
            gate.release(100)
            await until(lambda: engine.statistics().running == 0)
            rest = [delta async for delta in deltas]
        assert len(rest) == 1
        assert list(first.merged(rest[0]).tokens) == answer((1, 2, 1), 20)


async def test_a_refused_request_raises_before_any_delta() -> None:
    with running() as engine:
        long = GenerationRequest("a", (1,) * 64, StopRules(5))
        with pytest.raises(PromptTooLongError):
            await collect(engine, long)


@pytest.mark.unfinished("the loop fails in a step")
async def test_a_failed_loop_ends_streams_fails_the_check_and_refuses_new_ones() -> None:
    steps = iter(range(3))

    def fault() -> None:
        if next(steps, None) is None:
            raise RuntimeError("device lost")

    with running(PretendRunner(fault)) as engine:
        delta = await collect(engine, request("a"))
        assert delta.finish is FinishReason.FAILED
        assert delta.error is not None and "device lost" in delta.error
        with pytest.raises(EngineDeadError, match="device lost"):
            engine.check()
        with pytest.raises(EngineDeadError):
            await collect(engine, request("b"))


@pytest.mark.unfinished("the loop fails before it takes the requests")
async def test_a_request_that_cannot_be_added_ends_those_that_wait_with_it(monkeypatch) -> None:
    with running() as engine:
        add = engine._engine.add

        def broken(request: GenerationRequest, *given, **more) -> None:
            if request.id == "xx":
                raise RuntimeError("a bug")
            add(request, *given, **more)

        monkeypatch.setattr(engine._engine, "add", broken)
        streams = [engine.stream(request("x" * n)) for n in range(1, 5)]
        with engine._changed:  # so that the thread takes all of them at once
            first = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.sleep(0)
        deltas = await asyncio.wait_for(asyncio.gather(*first), HANG_S)
        assert [delta.finish for delta in deltas] == [FinishReason.FAILED] * 4
        assert all("a bug" in delta.error for delta in deltas)
        for stream in streams:
            await stream.aclose()


async def test_a_stuck_step_fails_the_check() -> None:
    gate, entered, now_s = threading.Semaphore(0), threading.Event(), 0.0

    def step() -> None:
        entered.set()
        gate.acquire()

    with running(PretendRunner(step), stall_s=300.0, clock=lambda: now_s) as engine:
        engine.check()
        task = asyncio.create_task(collect(engine, request("a", 3)))
        await until(entered.is_set)
        now_s += 299.0
        engine.check()
        now_s += 2.0
        with pytest.raises(EngineDeadError, match="no step has finished for 300 seconds"):
            engine.check()
        gate.release(10)
        assert (await task).finish is FinishReason.LENGTH
        engine.check()


async def test_an_engine_that_is_closing_or_not_started_takes_no_request() -> None:
    with pytest.raises(EngineDeadError, match="is not running"):
        await collect(engine_of(), request("a"))
    with running() as engine:
        engine._closing = True  # the loop has not seen it yet
        with pytest.raises(EngineDeadError, match="is closing"):
            await collect(engine, request("a"))


@pytest.mark.unfinished("the engine is closed during a request")
async def test_closing_ends_live_requests() -> None:
    gate = threading.Semaphore(2)
    with running(PretendRunner(gate.acquire)) as engine:
        task = asyncio.create_task(collect(engine, request("a", 50)))
        await until(lambda: engine.statistics().running == 1)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.sleep(0)
        gate.release(20)
        await closing
        assert (await task).finish is FinishReason.FAILED
