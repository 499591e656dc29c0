"""Loaded models that the store loses or replaces behind the server, as `caravan rm` does."""

import asyncio
from contextlib import suppress

import pytest

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from serve_app.on_demand.processes import LIST_STALE_S, PoolDirectory
from tests.denied_access import deny
from tests.patience import pass_time, settled, until
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of, serving

LOAD = {"model": "kept", "messages": [], "stream": False, "keep_alive": -1}
ASK = LOAD | {"messages": [{"role": "user", "content": "hi"}]}


def remove(root) -> None:
    Store(root).remove(ModelName.parse("kept"))


async def loaded(client) -> list[str]:
    names = [each["name"] for each in (await client.get("/api/ps")).json()["models"]]
    return [name for name in names if name != "fixed:latest"]  # which is configured


@pytest.mark.parametrize("change", ["removed", "replaced"])
async def test_a_model_that_the_store_loses_is_unloaded(root, tiny, change):
    async with cluster_of(root) as cluster, serving(cluster) as client:
        (process,) = cluster.processes
        await client.post("/api/chat", json=LOAD)
        assert await loaded(client) == ["kept:latest"]
        if change == "removed":
            remove(root)
        else:
            put(Store(root), "kept", {"model": tiny, "system": b"Be brief."})
        await loaded(client)
        await until(lambda: not process.store_manager.pool.residents())
        assert process.loader.unloads == ["kept:latest"] and await loaded(client) == []


async def test_a_lost_model_is_unloaded_after_its_running_requests(root):
    async with cluster_of(root) as cluster, serving(cluster) as client:
        (process,) = cluster.processes
        await client.post("/api/chat", json=LOAD)
        model = process.loader.models["kept:latest"]
        model.may_end.clear()
        asking = asyncio.create_task(client.post("/api/chat", json=ASK))
        await until(lambda: model.begun)
        remove(root)
        assert await loaded(client) == ["kept:latest"] and not model.closed
        model.may_end.set()
        assert (await asking).json()["done_reason"] == "stop"
        await until(lambda: not process.store_manager.pool.residents())
        assert model.closed and await loaded(client) == []


async def test_the_loss_of_a_model_is_noticed_without_requests(root):
    async with cluster_of(root) as cluster, serving(cluster) as client:
        (process,) = cluster.processes
        await client.post("/api/chat", json=LOAD)
        remove(root)
        sweeping = asyncio.create_task(process.store_manager.sweep_periodically())
        await until(lambda: process.loader.unloads == ["kept:latest"])
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping


async def test_a_model_stays_loaded_while_its_store_cannot_be_read(root, monkeypatch):
    async with cluster_of(root) as cluster, serving(cluster) as client:
        (process,) = cluster.processes
        await client.post("/api/chat", json=LOAD)
        deny(monkeypatch, root / "manifests")
        assert await loaded(client) == ["kept:latest"]
        await settled()
        assert process.loader.unloads == []


async def test_a_lost_model_that_is_being_unloaded_counts_as_unloaded_only_afterwards(root):
    async with cluster_of(root) as cluster, serving(cluster) as client:
        (process,) = cluster.processes
        await client.post("/api/chat", json=LOAD)
        process.loader.may_unload.clear()
        remove(root)
        await process.store_manager.report()
        unloading = asyncio.create_task(process.store_manager.pool.unload("KEPT:latest"))
        await until(lambda: process.loader.unloading)
        assert not unloading.done()
        process.loader.may_unload.set()
        assert await unloading
        assert process.loader.unloads == ["kept:latest"]


async def test_a_request_some_time_after_a_change_has_the_options_of_the_new_version(root, tiny):
    async with cluster_of(root) as cluster:
        pool = PoolDirectory(cluster)
        assert (await pool.find("kept")).options.num_predict is None
        put(Store(root), "kept", {"model": tiny, "params": b'{"num_predict": 3}'})
        await pass_time(LIST_STALE_S + 0.1)
        assert (await pool.find("kept")).options.num_predict == 3
        pool.close()
