"""Requests that a pool refuses because models in use have the memory or the places."""

import asyncio

import pytest

from runtime.errors import OverloadedError
from tests.unit.serve_app.on_demand.fake_loader import FakeLoader
from tests.unit.serve_app.on_demand.test_model_pool import ask, names, pool_of, using


@pytest.mark.parametrize(("needed", "free"), [(71, 10**12), (61, 20)])
async def test_a_refused_request_unloads_nothing(needed, free):
    """Its client retries, and would unload the idle models of all others again and again. Of the
    limit, 70 bytes are not in use, of a device where 20 are free 60."""
    loader = FakeLoader(busy=(30, 30), i=(20, 20), j=(20, 20), big=(needed, needed))
    async with pool_of(loader) as pool, using(pool, loader, "busy"):
        await ask(pool, "i")
        await ask(pool, "j")
        loader.free = free
        with pytest.raises(OverloadedError):
            await ask(pool, "big")
        assert loader.unloads == [] and names(pool) == {"busy", "i", "j"}
        loader.free = 10**12
        loader.sizes["big"] = (70, 70)
        await ask(pool, "big")
        assert loader.unloads == ["i", "j"]


async def test_weights_that_only_idle_models_share_do_not_count_as_held():
    base = ("/store/base", 40)
    loader = FakeLoader(busy=(40, 40), a=(50, 50, *base), b=(65, 65, *base))
    async with pool_of(loader) as pool, using(pool, loader, "busy"):
        await ask(pool, "a")
        with pytest.raises(OverloadedError):
            await ask(pool, "b")
        assert loader.unloads == []


async def test_a_request_that_finds_all_places_in_use_unloads_nothing():
    loader = FakeLoader(a=(1, 1), b=(1, 1), c=(1, 1))
    async with pool_of(loader, max_models=2) as pool, using(pool, loader, "a"):
        async with using(pool, loader, "b"):
            with pytest.raises(OverloadedError, match=r"`on_demand.max_models` is 2; .* use: 2"):
                await ask(pool, "c")
        await ask(pool, "c")
        assert loader.unloads == ["b"]


async def test_a_refusal_does_not_name_models_that_the_client_may_not_know(loader, capsys):
    async with pool_of(loader) as pool, using(pool, loader, "a"), using(pool, loader, "b"):
        with pytest.raises(OverloadedError) as refused:
            await ask(pool, "c")
    assert str(refused.value) == (
        "model 'c' needs 40 bytes and 0 are free for models on demand; loaded models in use: 2"
    )
    assert '"in_use": ["a", "b"]' in capsys.readouterr().err, "for the operator"


@pytest.mark.parametrize("other", ["b", "huge"])
async def test_a_model_without_memory_yet_takes_no_place(other):
    """The first of two simultaneous requests has it, also if the other could never be served."""
    loader = FakeLoader(a=(10, 10), b=(10, 10), huge=(900, 900))
    async with pool_of(loader, max_models=1) as pool:
        both = asyncio.gather(ask(pool, "a"), ask(pool, other), return_exceptions=True)
        assert (await both)[0] == "a"
