"""Failover between processes with models on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from model_zoo.store.store import Store
from serve_app.on_demand import process_reports
from serve_app.on_demand.processes import CHECK_S, PoolDirectory
from serve_app.transport.client import SILENCE_S
from tests.loopback import digest
from tests.patience import HANG_S, pass_time, until
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import Process, cluster_of, serving
from tests.unit.serve_app.on_demand.test_on_demand import chat, task

ABSENT = digest(b"in no store")


@pytest.fixture
def roots(tiny, tmp_path) -> tuple[Path, Path]:
    """Two stores that both have the model "both"."""
    stores = tmp_path / "left", tmp_path / "right"
    for root in stores:
        put(Store(root), "both", {"model": tiny})
    return stores


async def test_a_stream_continues_in_another_process_if_its_own_dies(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        await chat(client, "both", messages=[])
        (first,) = [p for p in cluster.processes if p.loader.loads]
        (other,) = [p for p in cluster.processes if p is not first]
        model = first.loader.models["both:latest"]
        model.may_end.clear()
        model.waiting = 0
        answer = asyncio.create_task(chat(client, "both"))
        await until(lambda: model.begun)
        await first.die()
        reported = (await answer).json()
        assert reported["message"]["content"] == "both:latest" and reported["done"]
        assert [name for name, _ in other.loader.loads] == ["both:latest"]


@pytest.mark.parametrize("loaded", [False, True])
async def test_an_answer_is_continued_only_with_the_context_that_it_began_with(roots, loaded):
    """Another context may cut the prompt elsewhere."""
    async with cluster_of(*roots, roots[0]) as cluster:
        short, *long = cluster.processes
        short.loader.context_tokens //= 2
        pool = PoolDirectory(cluster)
        everyone = frozenset(cluster.names)
        first = await pool.choose(task("both"), avoid=everyone - {"p1"})
        if loaded:  # the model is known to be where it cannot be continued
            await short.store_manager.pool.load("both", None)
            pool.forget()
        again = await pool.choose(task("both"), avoid=frozenset({"p1"}), identity=first.model)
        assert (again.replica, again.model) == ("p2", first.model)
        only = await pool.choose(task("both"), avoid=frozenset({"p1", "p2"}), identity=first.model)
        assert only.replica in ("p1", "p2"), "rather than one that cannot continue"
        for process in long:
            await process.die()
        pool.forget()
        other = await pool.choose(task("both"), identity=first.model)
        assert other.replica == "p0" and other.model != first.model
        pool.close()


async def test_a_context_is_requested_once_for_all_tasks(roots):
    async with cluster_of(roots[0]) as cluster:
        pool = PoolDirectory(cluster)
        await pool.find("both")
        (process,) = cluster.processes
        process.calls.clear()
        addresses = await asyncio.gather(*(pool.choose(task("both")) for _ in range(9)))
        assert len({address.model for address in addresses}) == 1
        assert process.calls["call"] == 1
        pool.close()


@pytest.mark.parametrize("what", ["describe", "load"])
async def test_a_call_is_repeated_on_another_process_if_the_first_is_lost(roots, what):
    async with cluster_of(*roots) as cluster:
        pool = PoolDirectory(cluster)
        first = (await pool.choose(task("both"))).replica
        (dead,) = [p for p in cluster.processes if p.name == first]
        (other,) = [p for p in cluster.processes if p is not dead]
        dead.alive = False
        if what == "describe":
            assert (await pool.describe("both", verbose=False)).name == "both:latest"
        else:
            await pool.load("both", None)
            assert (dead.loader.loads, other.loader.loads) == ([], [("both:latest", 10)])
        pool.close()


async def test_a_cancelled_caller_does_not_mark_old_reports_as_new(roots):
    async with cluster_of(*roots) as cluster:
        pool = PoolDirectory(cluster)
        for process in cluster.processes:
            process.awake.clear()
        asking = asyncio.create_task(pool.loaded())
        await until(lambda: all(process.calls["report"] for process in cluster.processes))
        asking.cancel()
        await asyncio.wait({asking})
        for process in cluster.processes:
            process.awake.set()
        async with asyncio.timeout(HANG_S):
            assert len(await pool.reports()) == 2
            assert cluster.awaited == 0, "they were there all the time"
        pool.close()


async def test_concurrent_callers_share_one_request_for_a_report(roots):
    async with cluster_of(*roots) as cluster:
        pool = PoolDirectory(cluster)
        await asyncio.gather(*(pool.reports() for _ in range(9)))
        assert [process.calls["report"] for process in cluster.processes] == [1, 1]
        pool.close()


async def test_a_first_report_is_awaited_for_as_long_as_it_takes(roots):
    async with cluster_of(roots[0]) as cluster:
        pool, (process,) = PoolDirectory(cluster), cluster.processes
        process.awake.clear()
        asking = asyncio.create_task(pool.listed())
        await until(lambda: process.calls["report"])
        for _ in range(3):
            await pass_time(process_reports.PATIENCE_S)
        process.awake.set()
        assert len(await asking) == 1
        pool.close()


async def test_models_of_a_store_without_processes_are_not_listed(roots, tiny):
    put(Store(roots[0]), "left", {"model": tiny})
    async with cluster_of(*roots) as cluster:
        pool = PoolDirectory(cluster)
        assert len(await pool.listed()) == 2
        await cluster.processes[0].die()
        pool.forget()
        assert [model.name for model in await pool.listed()] == ["both:latest"]
        pool.close()


async def test_requests_get_the_reason_while_no_process_can_load_models(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        failed, later = cluster.processes
        cluster.processes, failed.refusal = [failed], "no GPU"
        async with asyncio.timeout(HANG_S):
            refused = await chat(client, "both")
            assert (refused.status_code, refused.json()["error"]) == (503, "no GPU")
            loaded = (await client.get("/api/ps")).json()["models"]
            assert [each["name"] for each in loaded] == ["fixed:latest"]
        cluster.processes = [later]
        assert (await chat(client, "both")).status_code == 200


@asynccontextmanager
async def with_one_hanging(*roots: Path) -> AsyncIterator[tuple[PoolDirectory, Process, Process]]:
    """A directory that knows both processes, the one that hangs from now on, and the other."""
    async with cluster_of(*roots) as cluster:
        pool = PoolDirectory(cluster)
        first = (await pool.choose(task("both"))).replica
        (hanging,) = [p for p in cluster.processes if p.name == first]
        (other,) = [p for p in cluster.processes if p is not hanging]
        for process in cluster.processes:
            process.calls.clear()
        hanging.awake.clear()
        try:
            yield pool, hanging, other
        finally:
            hanging.awake.set()
            pool.close()


async def test_a_process_that_hangs_does_not_delay_calls_of_others(roots, monkeypatch):
    async with with_one_hanging(*roots) as (pool, hanging, other):
        assert [each.result() for each in await pool.call([other.name], "has_blob", ABSENT)] == [
            False
        ]
        await pool.loaded()  # waits for a while
        while [report.replica for report in await pool.reports()] != [other.name]:
            await pass_time(1.0)
        monkeypatch.setattr(process_reports, "PATIENCE_S", 10 * HANG_S)  # a wait would time out
        assert (await pool.describe("both", verbose=False)).name == "both:latest"
        await pool.load("both", None)
        [status] = await pool.statuses()
        assert (status.replica, [*status.engines]) == (other.name, ["both:latest"])
        await pool.unload("both")
        assert [each.replica for each in await pool.reports()] == [other.name]
        assert (hanging.loader.loads, other.loader.loads) == ([], [("both:latest", 10)])
        hanging.awake.set()

        async def returned() -> bool:
            return hanging.name in {report.replica for report in await pool.reports()}

        await until(returned)


async def test_statuses_are_those_of_the_processes_that_answer(roots):
    async with with_one_hanging(*roots) as (pool, hanging, other):
        asking = asyncio.create_task(pool.statuses())
        await until(lambda: hanging.calls["call"])
        while not asking.done():
            await pass_time(1.0)
        assert [each.replica for each in await asking] == [other.name]


@pytest.mark.parametrize("what", ["describe", "load"])
async def test_a_call_is_repeated_on_another_process_if_the_first_hangs(roots, what):
    async with with_one_hanging(*roots) as (pool, hanging, other):
        call = pool.load("both", 1) if what == "load" else pool.describe("both", verbose=False)
        calling = asyncio.create_task(call)
        await until(lambda: hanging.calls["call"])
        while not other.calls["call"]:
            await pass_time(1.0)
        await calling
        assert other.loader.loads == ([("both:latest", 10)] if what == "load" else [])


async def test_a_call_may_take_long_while_its_process_answers(roots):
    async with cluster_of(roots[0]) as cluster:
        pool = PoolDirectory(cluster)
        (process,) = cluster.processes
        process.loader.may_load.clear()
        loading = asyncio.create_task(pool.load("both", None))
        await until(lambda: process.calls["call"] > 1)
        for _ in range(3 * round(CHECK_S + SILENCE_S)):
            await pass_time(1.0)
            await pool.reports()
        assert not loading.done()
        process.loader.may_load.set()
        await loading
        assert process.loader.loads == [("both:latest", 10)]
        pool.close()
