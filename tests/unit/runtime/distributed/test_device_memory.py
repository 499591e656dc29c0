"""Memory plans of models whose layers are on several devices."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.distributed.device_memory import plan_memory_per_device
from runtime.engine import memory_plan
from runtime.engine.memory_plan import MemoryOptions, MemoryPlan
from runtime.errors import DoesNotFitError
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import page_bytes
from runtime.worker.input_preparer import StepLimits
from tests.unit.runtime.engine.test_memory_plan import FULL
from tests.unit.runtime.kv.test_state_pages import WIDE

MAIN, *OTHERS = (torch.device("cpu", number) for number in range(3))
SLOTS, CONTEXT, WEIGHTS = 4, 250, 1_000_000


def layout_of(layers: Sequence[LayerCache]) -> CacheLayout:
    return CacheLayout.of(layers, page_tokens=16)


def plan(
    placed: Sequence[tuple[LayerCache, torch.device]],
    *,
    memory_bytes: int = 10**9,
    without_cache: Sequence[torch.device] = (),
    **options: Any,
) -> MemoryPlan:
    layers, devices = zip(*placed, strict=True)
    model = SimpleNamespace(
        vocab_size=500,
        hidden_size=16,
        cache_devices=devices,
        layer_devices=(*devices, *without_cache),
        weight_bytes_on=lambda device: WEIGHTS * (device.index + 1),
        activation_bytes=lambda tokens, outputs: tokens + outputs,
    )
    return plan_memory_per_device(
        model,
        layout_of(layers),
        MAIN,
        MemoryOptions(
            limits=StepLimits(SLOTS, 32, CONTEXT),
            kv_dtype=CacheType.FLOAT32,
            memory_bytes=memory_bytes,
            **options,
        ),
    )


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch) -> None:
    monkeypatch.setattr(memory_plan, "recorded_bytes", lambda *_, **__: 0)


ONE = page_bytes(layout_of([WIDE]), 0, CacheType.FLOAT32)
# The states of three layers: one on the first device, two on the second, and none on the main one.
DIVIDED = [(FULL, MAIN), (WIDE, OTHERS[0]), (FULL, OTHERS[0]), (WIDE, OTHERS[1]), (WIDE, OTHERS[1])]


def test_devices_without_states_permit_checkpoints_on_the_others() -> None:
    pages = plan(DIVIDED, state_checkpoint_bytes=None).pages
    assert pages == (SLOTS * 16, SLOTS + 4 * SLOTS)


def test_bytes_for_checkpoints_are_those_of_all_devices_together() -> None:
    for count in range(7):
        for more in (0, 3 * ONE - 1):
            pages = plan(DIVIDED, state_checkpoint_bytes=3 * ONE * count + more).pages
            assert pages == (SLOTS * 16, SLOTS + count)


def test_the_device_with_the_least_room_for_states_limits_their_number() -> None:
    roomy = plan(DIVIDED, cache_tokens=CONTEXT, state_checkpoint_bytes=0)
    assert roomy.pages == (16, SLOTS)
    alone = plan([(WIDE, OTHERS[1])] * 2 + [(FULL, MAIN)], cache_tokens=CONTEXT)
    least = alone.others_bytes - 2 * ONE
    tight = plan(DIVIDED, cache_tokens=CONTEXT, memory_bytes=least, state_checkpoint_bytes=0)
    assert tight.pages == (16, SLOTS - 1)


def test_devices_whose_layers_have_no_cache_need_memory_too() -> None:
    placed = [(FULL, MAIN), (FULL, OTHERS[0])]
    without, full = plan(placed), plan(placed, without_cache=[OTHERS[1]])
    assert full.pages == without.pages and full.cache_bytes == without.cache_bytes
    more = full.others_bytes - without.others_bytes
    assert more > 3 * WEIGHTS
    with pytest.raises(DoesNotFitError, match=r"on cpu:2: 3,000,000 .* 0 for a cache"):
        plan(placed, without_cache=[OTHERS[1]], memory_bytes=more - 1)


def test_the_least_memory_is_that_of_the_device_which_needs_most() -> None:
    """`OTHERS[1]` has three times the weights of the main device."""
    least = plan(DIVIDED).least_bytes
    assert plan(DIVIDED, memory_bytes=least).least_bytes == least
    with pytest.raises(DoesNotFitError, match="on cpu:2"):
        plan(DIVIDED, memory_bytes=least - 1)
