"""Failover between processes with models on demand."""

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from model_zoo.store.store import Store
from serve_app.on_demand.processes import PoolDirectory
from tests.patience import HANG_S, until
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of, serving
from tests.unit.serve_app.on_demand.test_on_demand import chat, task


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


@pytest.mark.parametrize("what", ["describe", "load"])
async def test_a_call_is_repeated_on_another_process_if_the_first_is_lost(roots, what):
    async with cluster_of(*roots) as cluster:
        pool = PoolDirectory(cluster)
        first = (await pool.choose(task("both"))).replica
        (dead,) = [p for p in cluster.processes if p.store_manager.address.replica == first]
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
        answers, cluster.broadcast = (
            cluster.broadcast,
            AsyncMock(side_effect=asyncio.CancelledError),
        )
        with pytest.raises(asyncio.CancelledError):
            await pool.loaded()
        cluster.broadcast = answers
        async with asyncio.timeout(HANG_S):
            assert len(await pool.reports()) == 2
            assert cluster.awaited == 0, "they were there all the time"
        pool.close()
