"""The pool of one process: which models it loads and unloads, and when."""

import asyncio
import json
import time
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from runtime.engine.request import SamplingParams, Usage
from runtime.errors import (
    DoesNotFitError,
    EngineDeadError,
    ModelFileError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
)
from serve_app.autoscaling.load_metrics import METRIC_NAMES
from serve_app.config.keep_alive import FOREVER
from serve_app.messages.tasks import ChatTask, RawText, merge
from serve_app.on_demand import model_pool
from serve_app.on_demand.model_pool import ModelPool, PoolLimits
from tests.patience import HANG_S, pass_time, settled, until
from tests.unit.serve_app.on_demand.fake_loader import FakeLoader


@asynccontextmanager
async def pool_of(loader: FakeLoader, **limits):
    stated = {"max_loaded_bytes": 100, **limits}
    pool = ModelPool(loader, PoolLimits(**stated), clock=lambda: 1000.0)
    try:
        async with asyncio.timeout(HANG_S):
            yield pool
    finally:
        for model in loader.models.values():
            model.may_end.set()
        loader.may_load.set()
        loader.may_unload.set()
        await pool.close()


def task(model: str, keep_alive_s: float | None = None, tenant: str = "") -> ChatTask:
    prompt, sampling = RawText("hi"), SamplingParams(seed=1)
    return ChatTask("t", model, prompt, sampling, keep_alive_s=keep_alive_s, tenant=tenant)


async def ask(
    pool: ModelPool, model: str, keep_alive_s: float | None = None, *, tenant: str = ""
) -> str:
    async with aclosing(pool.generate(task(model, keep_alive_s, tenant))) as deltas:
        return merge([delta async for delta in deltas]).text


@asynccontextmanager
async def using(pool: ModelPool, loader: FakeLoader, model: str):
    """Keeps a request running."""
    await pool.load(model, None)
    loader.models[model].may_end.clear()
    async with aclosing(pool.generate(task(model))) as deltas:
        await anext(deltas)
        yield
        loader.models[model].may_end.set()


def names(pool: ModelPool) -> set[str]:
    return {resident.loaded.model.name for resident in pool.residents()}


async def test_concurrent_requests_load_a_model_once(loader):
    async with pool_of(loader) as pool:
        answers = await asyncio.gather(*(ask(pool, "a") for _ in range(20)), ask(pool, "A"))
        assert answers == ["a"] * 21 and loader.loads == [("a", 50)]


async def test_an_unknown_name_is_not_found(loader):
    async with pool_of(loader) as pool:
        with pytest.raises(ModelNotFoundError, match="'x' not found"):
            await ask(pool, "x")
        assert not pool.residents()


async def test_the_least_recently_used_model_is_unloaded(loader):
    async with pool_of(loader) as pool:
        for model in ("a", "b", "a", "c"):
            await ask(pool, model)
        assert loader.unloads == ["b"] and names(pool) == {"a", "c"}
        assert pool.free_bytes == 0


async def test_weights_that_models_share_count_once():
    base = ("/store/base", 30)
    loader = FakeLoader(a=(40, 40, *base), b=(40, 40, *base), c=(45, 45), d=(40, 40, "x", 30))
    loader.free = 50
    async with pool_of(loader) as pool:
        for model, free in (("a", 60), ("b", 50), ("c", 5)):
            await ask(pool, model)
            assert pool.free_bytes == free
        assert names(pool) == {"a", "b", "c"}
        assert pool.measures() and await pool.unload("a")
        assert pool.free_bytes == 15, "the other model still has the shared weights"
        await ask(pool, "d")
        assert loader.unloads == ["a", "b"], "another base is not shared"


async def test_models_in_use_stay_loaded_and_a_full_pool_refuses_at_once(loader):
    async with pool_of(loader) as pool, using(pool, loader, "a"), using(pool, loader, "b"):
        with pytest.raises(OverloadedError, match=r"'c' needs 40 bytes and 0 are free"):
            await ask(pool, "c")
        assert loader.unloads == [] and names(pool) == {"a", "b"}


async def test_an_idle_model_is_unloaded_rather_than_an_older_one_in_use(loader):
    async with pool_of(loader) as pool, using(pool, loader, "a"):
        await ask(pool, "b")
        await ask(pool, "c")
        assert loader.unloads == ["b"]


async def test_a_model_gets_only_a_share_of_the_memory_if_that_suffices():
    loader = FakeLoader(big=(30, 500), small=(60, 60), tight=(45, 80))
    async with pool_of(loader) as pool:
        await ask(pool, "big")
        assert loader.loads == [("big", 50)]
        await ask(pool, "tight")
        assert loader.loads[1:] == [("tight", 50)] and loader.unloads == []
        await ask(pool, "small")
        assert loader.loads[2:] == [("small", 60)] and loader.unloads == ["big", "tight"]


async def test_several_models_are_unloaded_if_one_is_not_enough():
    loader = FakeLoader(a=(20, 20), b=(20, 20), c=(20, 20), big=(70, 70))
    async with pool_of(loader) as pool:
        for model in ("a", "b", "c", "big"):
            await ask(pool, model)
        assert loader.unloads == ["a", "b"] and names(pool) == {"c", "big"}


async def test_the_number_of_loaded_models_is_limited():
    loader = FakeLoader(a=(1, 1), b=(1, 1), c=(1, 1))
    async with pool_of(loader, max_models=2) as pool:
        for model in ("a", "b", "c"):
            await ask(pool, model)
        assert loader.unloads == ["a"]


async def test_a_model_that_never_fits_is_refused_with_its_memory_need():
    loader = FakeLoader(a=(40, 50), huge=(101, 200))
    async with pool_of(loader) as pool:
        await ask(pool, "a")
        with pytest.raises(ModelUnavailableError, match=r"needs 101 bytes; .* may take 100"):
            await ask(pool, "huge")
        assert loader.unloads == [] and names(pool) == {"a"}


async def test_memory_that_other_processes_use_counts():
    loader = FakeLoader(a=(40, 50))
    loader.free = 39
    async with pool_of(loader) as pool:
        with pytest.raises(
            OverloadedError, match=r"39 are free .*; other processes use the memory"
        ):
            await ask(pool, "a")
        loader.free = 45
        await ask(pool, "a")
        assert loader.loads == [("a", 45)]


async def test_memory_is_reclaimed_before_a_model_is_refused_or_another_unloaded(loader):
    """The exception of a failed request may reference the engine while that is unloaded."""
    async with pool_of(loader) as pool:
        await ask(pool, "a")
        loader.free, loader.unreclaimed = 10, 35
        assert await ask(pool, "b") == "b"
        assert loader.loads[1:] == [("b", 45)] and loader.unloads == []


async def test_a_failed_load_releases_its_memory(loader):
    async with pool_of(loader) as pool:
        loader.fails = ModelFileError("it is damaged")
        for _ in range(2):
            with pytest.raises(ModelFileError, match="it is damaged"):
                await ask(pool, "a")
        assert pool.free_bytes == 100 and not pool.residents()
        loader.fails = DoesNotFitError("too large after all")
        with pytest.raises(ModelUnavailableError, match="too large after all"):
            await ask(pool, "a")
        loader.fails = None
        assert await ask(pool, "a") == "a"


async def test_the_log_names_the_class_of_an_error_without_text(loader, capsys):
    async with pool_of(loader) as pool:
        loader.fails = AssertionError()
        with pytest.raises(AssertionError):
            await ask(pool, "a")
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    assert [line["reason"] for line in lines if line["event"] == "not loaded"] == [
        "AssertionError()"
    ]


async def test_an_idle_model_is_unloaded_after_keep_alive(loader):
    async with pool_of(loader, keep_alive_s=60.0) as pool:
        async with using(pool, loader, "a"):
            await pass_time(61.0)
            assert names(pool) == {"a"}
        await pass_time(61.0)
        await until(lambda: loader.unloads == ["a"])
        assert await ask(pool, "a") == "a"


async def test_the_last_stated_keep_alive_applies(loader):
    async with pool_of(loader, keep_alive_s=60.0) as pool:
        await ask(pool, "a", FOREVER)
        await ask(pool, "a")
        (resident,) = pool.residents()
        assert resident.loaded.expires_at is None
        await pass_time(61.0)
        assert names(pool) == {"a"}
        await ask(pool, "a", 60.0)
        (resident,) = pool.residents()
        assert resident.loaded.expires_at == 1060.0
        await ask(pool, "a", 0.0)
        assert loader.unloads == ["a"] and not pool.residents()


async def test_each_use_restarts_keep_alive(loader):
    async with pool_of(loader, keep_alive_s=900.0) as pool:
        await ask(pool, "a", 60.0)
        for _ in range(4):
            await pass_time(40.0)
            await ask(pool, "a")
        assert loader.unloads == []
        await pass_time(61.0)
        await until(lambda: loader.unloads == ["a"])


async def test_a_model_that_was_used_since_its_keep_alive_expired_stays_loaded(loader):
    async with pool_of(loader, keep_alive_s=60.0) as pool:
        await ask(pool, "a")
        async with pool._changing.place(""):  # as during a change of another model
            await pass_time(61.0)
            await ask(pool, "a")
        await settled()
        assert loader.unloads == [] and names(pool) == {"a"}
        await pass_time(61.0)
        await until(lambda: loader.unloads == ["a"])


async def test_unloading_waits_for_running_requests(loader):
    async with pool_of(loader) as pool:
        async with using(pool, loader, "a"):
            assert await pool.unload("a")
            assert names(pool) == {"a"} and loader.unloads == []
        assert loader.unloads == ["a"]
        assert not await pool.unload("a") and not await pool.unload("x")


async def test_a_cancelled_request_does_not_cancel_a_shared_load(loader):
    loader.may_load.clear()
    async with pool_of(loader) as pool:
        draining, staying = (asyncio.create_task(ask(pool, "a")) for _ in range(2))
        await until(lambda: [each.users for each in pool.residents()] == [2])
        draining.cancel()
        with suppress(asyncio.CancelledError):
            await draining
        loader.may_load.set()
        assert await staying == "a" and len(loader.loads) == 1


async def test_waiting_for_a_load_counts_as_queueing(loader):
    """Also for a request that joins the load of another."""
    loader.may_load.clear()
    async with pool_of(loader) as pool:
        asked = [asyncio.create_task(usage_of(pool, "a")) for _ in range(2)]
        await until(lambda: [each.users for each in pool.residents()] == [2])
        begun_ns = time.monotonic_ns()
        await settled()
        waited_ns = time.monotonic_ns() - begun_ns
        loader.may_load.set()
        for usage in await asyncio.gather(*asked):
            assert usage.queue_ns > waited_ns
            assert (usage.prompt_ns, usage.decode_ns) == (2_000, 3_000)
        assert len(loader.loads) == 1


async def usage_of(pool: ModelPool, model: str) -> Usage:
    async with aclosing(pool.generate(task(model))) as deltas:
        usage = merge([delta async for delta in deltas]).usage
    assert usage is not None
    return usage


async def test_a_load_without_waiting_requests_expires(loader):
    loader.may_load.clear()
    async with pool_of(loader, keep_alive_s=0.05) as pool:
        draining = asyncio.create_task(ask(pool, "a"))
        await until(lambda: [each.users for each in pool.residents()] == [1])
        draining.cancel()
        loader.may_load.set()
        await until(lambda: loader.unloads == ["a"])


async def test_the_number_of_requests_that_wait_for_a_load_is_limited(loader):
    loader.may_load.clear()
    async with pool_of(loader, max_waiting=3) as pool:
        asked = [asyncio.create_task(ask(pool, "a", tenant="one")) for _ in range(3)]
        await until(lambda: [each.users for each in pool.residents()] == [3])
        with pytest.raises(OverloadedError, match="3 requests of this client wait for model 'a'"):
            await ask(pool, "a", tenant="one")
        asked.append(asyncio.create_task(ask(pool, "a", tenant="two")))
        await until(lambda: [each.users for each in pool.residents()] == [4])
        with pytest.raises(OverloadedError, match="4 requests wait for model 'a'"):
            await ask(pool, "a", tenant="three")
        loader.may_load.set()
        assert await asyncio.gather(*asked) == ["a"] * 4


async def test_loads_take_turns_over_tenants():
    names = [f"flood {number}" for number in range(6)]
    loader = FakeLoader(**dict.fromkeys([*names, "other"], (1, 1)))
    loader.may_load.clear()
    async with pool_of(loader) as pool:
        asked = [asyncio.create_task(ask(pool, name, tenant="flood")) for name in names]
        await until(lambda: pool._changing.count == 5)  # the first one is being loaded
        asked.append(asyncio.create_task(ask(pool, "other", tenant="other")))
        await until(lambda: pool._changing.count == 6)
        loader.may_load.set()
        await asyncio.gather(*asked)
        # The first was being loaded, the second had its memory, the third was queued before.
        assert [name for name, _ in loader.loads[:4]] == [*names[:3], "other"]


async def test_a_new_version_of_a_model_is_loaded_and_the_old_one_retired(loader):
    async with pool_of(loader) as pool:
        async with using(pool, loader, "a"):
            old = loader.models["a"]
            loader.digests["a"] = "second"
            assert await ask(pool, "a") == "a"
            assert not old.closed and loader.models["a"].version.digest == "second"
            assert pool.free_bytes == 0
            old.may_end.set()
        await until(lambda: old.closed)
        assert names(pool) == {"a"} and pool.free_bytes == 50


@pytest.mark.parametrize("cancelled", ["a request for a new version", "an unload"])
async def test_a_model_is_unloaded_although_its_unloading_was_cancelled(loader, cancelled):
    async with pool_of(loader) as pool:
        await ask(pool, "a")
        old = loader.models["a"]
        if cancelled == "an unload":
            change = pool.unload("a")
        else:
            loader.digests["a"] = "second"
            change = ask(pool, "a")
        async with pool._changing.place(""):  # as during a change of another model
            changing = asyncio.create_task(change)
            await settled()
            changing.cancel()
            await asyncio.wait({changing})
            assert pool.free_bytes == 50
        await until(lambda: old.closed)
        await until(lambda: pool.free_bytes == 100)


async def test_the_bytes_of_a_model_count_until_it_is_unloaded(loader):
    """Also if the change for which it is unloaded is cancelled."""
    async with pool_of(loader) as pool:
        for model in ("a", "b"):
            await ask(pool, model)
        loader.may_unload.clear()
        loading = asyncio.create_task(pool.load("c", None))
        await until(lambda: pool._entries.keys() == {"b", "c"})
        pool._entries["c"].loading.cancel()
        await asyncio.wait({loading})
        assert pool.free_bytes == 0
        loader.may_unload.set()
        await until(lambda: pool.free_bytes == 50)


async def test_models_are_described_without_being_loaded(loader):
    async with pool_of(loader) as pool:
        assert (await pool.describe("A")).name == "a" and loader.loads == []
        await pool.load("a", None)
        assert (await pool.describe("a")).reserved_bytes == 50


async def test_residents_include_models_that_are_being_loaded(loader):
    async with pool_of(loader, keep_alive_s=300.0) as pool, using(pool, loader, "a"):
        loader.may_load.clear()
        asked = asyncio.create_task(ask(pool, "b"))
        await until(lambda: len(pool.residents()) == 2)
        reported = {each.loaded.model.name: each for each in pool.residents()}
        assert (reported["a"].users, reported["b"].users) == (1, 1)
        assert reported["b"].loaded.reserved_bytes == 50
        assert reported["b"].loaded.expires_at == 1300.0
        loader.may_load.set()
        await asked


async def test_load_metrics_cover_all_models_waiting_requests_and_lack_of_memory(loader):
    async with pool_of(loader) as pool, using(pool, loader, "a"):
        assert set(pool.measures()) == set(METRIC_NAMES) - {"operations"}
        assert pool.measures()["model_memory"] == 0.5
        assert (pool.measures()["running"], pool.measures()["waiting"]) == (1.0, 2.0)
        loader.may_load.clear()
        asked = asyncio.create_task(ask(pool, "b"))
        await until(lambda: pool.measures()["model_memory"] == 1.0)
        assert pool.measures()["waiting"] == 3.0, "requests that wait for a load count"
        loader.may_load.set()
        await asked
        assert pool.measures()["model_memory"] == 0.5, "idle models do not count"
        async with using(pool, loader, "b"):
            with pytest.raises(OverloadedError):
                await ask(pool, "c")
            assert pool.measures()["model_memory"] == 1.4


async def test_load_metrics_use_the_number_of_models_if_that_is_limited():
    loader = FakeLoader(a=(1, 1), b=(1, 1), c=(1, 1))
    async with pool_of(loader, max_models=2) as pool, using(pool, loader, "a"):
        assert pool.measures()["model_memory"] == 0.5
        async with using(pool, loader, "b"):
            assert pool.measures()["model_memory"] == 1.0
            with pytest.raises(OverloadedError):
                await ask(pool, "c")
            assert pool.measures()["model_memory"] == 1.5


async def test_totals_include_unloaded_models(loader):
    async with pool_of(loader) as pool:
        await ask(pool, "a")
        done = pool.measures()["steps_total"]
        await ask(pool, "a", 0.0)
        assert loader.unloads == ["a"] and pool.measures()["steps_total"] == done == 7.0


async def test_a_dead_engine_fails_the_health_check(loader):
    async with pool_of(loader) as pool:
        await ask(pool, "a")
        pool.check()
        loader.models["a"].dead = True
        with pytest.raises(EngineDeadError):
            pool.check()


async def test_an_engine_that_does_not_end_fails_the_health_check(loader, monkeypatch):
    async with pool_of(loader) as pool:
        await ask(pool, "a")
        loader.may_unload.clear()
        unloading = asyncio.create_task(pool.unload("a"))
        await until(lambda: loader.unloading)
        pool.check()
        with monkeypatch.context() as patched:
            patched.setattr(model_pool, "UNLOAD_S", -1.0)
            with pytest.raises(EngineDeadError, match="Unloading model 'a'"):
                pool.check()
            loader.may_unload.set()
            await unloading
            pool.check()


async def test_closing_unloads_everything(loader):
    async with pool_of(loader) as pool:
        await ask(pool, "a")
        await ask(pool, "b", FOREVER)
    assert sorted(loader.unloads) == ["a", "b"]
