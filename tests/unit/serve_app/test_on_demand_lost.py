"""Processes with models on demand that end: their answers and their tasks go to others."""

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from model_zoo.store.store import Store
from serve_app.on_demand.processes import PoolDirectory
from tests.patience import HANG_S, until
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.cli_runs import put
from tests.unit.serve_app.pretend_cluster import cluster_of, serving
from tests.unit.serve_app.test_on_demand import chat, task


@pytest.fixture
def roots(tmp_path) -> tuple[Path, Path]:
    """Two stores that both have the model "both"."""
    model = tmp_path / "tiny.gguf"
    write_tiny_llama(model, type="F16")
    stores = tmp_path / "left", tmp_path / "right"
    for root in stores:
        put(Store(root), "both", {"model": model.read_bytes()})
    return stores


async def test_an_answer_whose_process_dies_goes_on_in_another_which_loads_the_model(roots):
    async with cluster_of(*roots) as cluster, serving(cluster) as client:
        await chat(client, "both", messages=[])
        (first,) = [p for p in cluster.processes if p.loader.loads]
        (other,) = [p for p in cluster.processes if p is not first]
        model = first.loader.models["both:latest"]
        model.may_end.clear()
        model.waiting = 0
        answer = asyncio.create_task(chat(client, "both"))
        await until(lambda: first.store_manager.pool.residents()[0].users)
        await asyncio.sleep(0.1)  # until it has said something
        await first.die()
        told = (await answer).json()
        assert told["message"]["content"] == "both:latest" and told["done"]
        assert [name for name, _ in other.loader.loads] == ["both:latest"]


@pytest.mark.parametrize("what", ["describe", "load"])
async def test_what_a_process_that_ends_was_asked_for_a_model_the_next_one_is(roots, what):
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


async def test_who_leaves_while_processes_are_asked_does_not_make_old_news_new(roots):
    async with cluster_of(*roots) as cluster:
        pool = PoolDirectory(cluster)
        answers, cluster.ask = cluster.ask, AsyncMock(side_effect=asyncio.CancelledError)
        with pytest.raises(asyncio.CancelledError):
            await pool.loaded()
        cluster.ask = answers
        async with asyncio.timeout(HANG_S):
            assert len(await pool.processes()) == 2
            assert cluster.awaited == 0, "they were there all the time"
        pool.close()
