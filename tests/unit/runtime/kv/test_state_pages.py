"""Pages of states as tensors, and how many are reserved."""

import dataclasses

import pytest
import torch

from runtime.errors import DoesNotFitError
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_types import CacheType
from runtime.kv.page_group import CopyKind, PageCopy
from runtime.kv.pool import KVPool, page_bytes
from runtime.kv.states import StateCache
from tests.unit.runtime.engine.test_memory_plan import FULL, LOCAL, plan
from tests.unit.runtime.engine.test_recurrent_states import STATE

WIDE = dataclasses.replace(STATE, key_dim=40, value_dim=50)


@pytest.mark.parametrize("type", CacheType)
def test_states_have_the_shapes_they_declare_in_float32_whatever_the_cache_has(type) -> None:
    layout = CacheLayout.of([FULL, STATE, STATE], page_tokens=16)
    pool = KVPool(
        layout,
        pages=(6, 3),
        slots=3,
        pages_per_sequence=2,
        type=type,
        device=torch.device("cpu"),
    )
    for index in (1, 2):
        layer = pool.layer(index)
        assert layer.keys.shape == (4, 2, 7) and layer.values.shape == (4, 3, 4, 5)
        assert layer.keys.dtype == layer.values.dtype == torch.float32
    assert pool.layer(0).keys.dtype == type.dtype
    assert pool.page_tables[1].shape == (3, 1)
    taken = sum(pool.layer(i).keys.nbytes + pool.layer(i).values.nbytes for i in (1, 2))
    assert taken == 4 * page_bytes(layout, 1, type)


def test_a_state_may_be_inputs_alone() -> None:
    layout = CacheLayout.of([FULL, StateCache.of_inputs(channels=7, taps=2)], page_tokens=16)
    pool = KVPool(
        layout,
        pages=(6, 3),
        slots=3,
        pages_per_sequence=2,
        type=CacheType.FLOAT16,
        device=torch.device("cpu"),
        host_pages=(1, 2),
    )
    layer = pool.layer(1)
    assert layer.keys.shape == (4, 2, 7) and layer.values.numel() == 0
    assert layer.keys.nbytes == 4 * page_bytes(layout, 1, CacheType.FLOAT16)
    layer.keys[0] = 3.0
    pool.copy_pages([PageCopy(1, 0, 1, CopyKind.TO_HOST), PageCopy(1, 1, 2, CopyKind.FROM_HOST)])
    assert (layer.keys[2] == 3.0).all() and not layer.keys[1].any()


def test_every_slot_has_a_state_even_where_the_cache_holds_one_context() -> None:
    layers = (FULL, STATE, STATE, STATE)
    assert plan(layers=layers, cache_tokens=250).pages == (16, 4)
    assert plan(layers=layers).pages == (4 * 16, 4)


def test_checkpoints_take_the_bytes_they_are_given_or_a_share_of_the_cache() -> None:
    layers = (FULL, WIDE, WIDE)
    one = page_bytes(CacheLayout.of(layers, page_tokens=16), 1, CacheType.FLOAT32)
    plain = plan(layers=layers, cache_tokens=250)
    for nbytes, more in ((0, 0), (one - 1, 0), (5 * one, 5)):
        given = plan(layers=layers, cache_tokens=250, state_checkpoint_bytes=nbytes)
        assert given.pages == (16, 4 + more)
        assert given.cache_bytes == plain.cache_bytes + more * one
    assert plan(layers=layers, state_checkpoint_bytes=None).pages == (4 * 16, 4 + 16)
    needed = plain.available_bytes - plain.headroom_bytes
    little = {"memory_bytes": needed + 2 * one, "cache_tokens": 250, "layers": layers}
    eighth = (2 * one + plain.cache_bytes) // 8 // one
    assert plan(state_checkpoint_bytes=None, **little).pages == (16, 4 + eighth)
    assert plan(state_checkpoint_bytes=9 * one, **little).pages == (16, 4 + 2)
    assert plan(layers=(FULL,), state_checkpoint_bytes=10**6) == plan(layers=(FULL,))


@pytest.mark.parametrize("nbytes", [0, None, 10**6])
@pytest.mark.parametrize("cache_tokens", [None, 600])
@pytest.mark.parametrize("slots", [1, 4])
def test_the_least_memory_has_one_state_and_no_checkpoints(nbytes, cache_tokens, slots) -> None:
    given = {
        "layers": (FULL, LOCAL, WIDE, WIDE),
        "slots": slots,
        "cache_tokens": cache_tokens,
        "state_checkpoint_bytes": nbytes,
    }
    least = plan(memory_bytes=1 << 62, **given).least_bytes
    assert plan(memory_bytes=10**9, **given).least_bytes == least
    tight = plan(memory_bytes=least, **given)
    full, local, states = tight.pages
    assert (full, states) == (16 if cache_tokens is None else min(38, 16 * slots), 1)
    assert local == 7, "the window of 32 and two steps of 32 rows, wherever they begin"
    assert tight.headroom_bytes == 0 and tight.least_bytes == least
    with pytest.raises(DoesNotFitError):
        plan(memory_bytes=least - 1, **given)


def test_short_of_memory_fewer_sequences_run_at_once_before_a_context_is_refused() -> None:
    layers, context = (FULL, WIDE, WIDE), {"context_tokens": 4000, "slots": 8}
    roomy = plan(layers=layers, cache_tokens=4000, **context)
    assert roomy.pages == (250, 8)
    one = page_bytes(CacheLayout.of(layers, page_tokens=16), 1, CacheType.FLOAT32)
    assert one == 2 * 4 * (2 * 7 + 3 * 40 * 50)
    needed = roomy.available_bytes - roomy.headroom_bytes
    assert plan(layers=layers, memory_bytes=needed - 1, **context).pages == (250, 7)
    least = needed - 7 * one
    assert plan(layers=layers, memory_bytes=least, **context).pages == (250, 1)
    with pytest.raises(DoesNotFitError, match=f"{least:,}"):
        plan(layers=layers, memory_bytes=least - 1, **context)
