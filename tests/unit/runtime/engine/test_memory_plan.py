"""Memory plans: reserved bytes, refusals, and the measured memory of the machine."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.engine import memory_plan
from runtime.engine.memory_plan import (
    MemoryOptions,
    MemoryPlan,
    VisionBytes,
    available_bytes,
    plan_memory,
)
from runtime.engine.request import GenerationRequest, Sampled, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.errors import DoesNotFitError
from runtime.kv.cache_kinds import Chunked, Cross, Full, Sliding
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import KVPool
from runtime.worker.input_preparer import StepLimits

CPU = torch.device("cpu")
WEIGHTS, ACTIVATIONS = 1_000_000, 300_000
MODEL = SimpleNamespace(
    vocab_size=500,
    hidden_size=16,
    weight_bytes=WEIGHTS,
    activation_bytes=lambda tokens, outputs: ACTIVATIONS + tokens + outputs,
)
FULL = LayerCache(Full(), 2, 8, 8)
LOCAL = LayerCache(Sliding(32), 2, 8, 8)


def plan(
    *,
    layers: tuple[LayerCache, ...] = (FULL, FULL),
    memory_bytes: int | None = 10**9,
    slots: int = 4,
    step_tokens: int = 32,
    context_tokens: int = 250,
    **options: Any,
) -> MemoryPlan:
    return plan_memory(
        MODEL,
        CacheLayout.of(layers, page_tokens=16),
        CPU,
        MemoryOptions(
            limits=StepLimits(slots, step_tokens, context_tokens),
            kv_dtype=CacheType.FLOAT32,
            memory_bytes=memory_bytes,
            **options,
        ),
    )


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch) -> None:
    monkeypatch.setattr(memory_plan, "recorded_bytes", lambda *_, **__: 0)


def test_with_room_to_spare_every_slot_gets_a_full_context():
    memory = plan()
    assert memory.pages == (4 * 16,)
    assert memory.cache_tokens == 4 * 16 * 16
    assert memory.cache_bytes == (64 + 1) * 16 * 2 * 16 * 4 * 2
    assert memory.weight_bytes == WEIGHTS
    assert memory.activation_bytes == ACTIVATIONS + 32 + 4


def test_set_aside_bytes_reduce_measured_memory_but_not_given_memory(monkeypatch):
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: 10**9)
    assert plan(memory_bytes=None).available_bytes == 10**9
    assert plan(memory_bytes=None, set_aside_bytes=400_000_000).available_bytes == 600_000_000
    assert plan(set_aside_bytes=400_000_000) == plan()
    with pytest.raises(DoesNotFitError, match=r"beside 999,000,000 for images.*max_image_pixels"):
        plan(memory_bytes=None, set_aside_bytes=999_000_000)


@pytest.mark.parametrize("set_aside, free", [(10**9, 10**9), (3 * 10**9, 1_200_000)])
def test_what_is_set_aside_is_lowered_where_the_weights_fit_without_it(
    set_aside, free, monkeypatch
):
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: free)
    with pytest.raises(DoesNotFitError, match=r"`host_cache_bytes`\)\. Lower these settings"):
        plan(memory_bytes=None, set_aside_bytes=set_aside)
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: WEIGHTS)
    with pytest.raises(DoesNotFitError, match=r"The weights alone exceed that"):
        plan(memory_bytes=None, set_aside_bytes=set_aside)


def test_reserved_and_free_bytes_add_up_to_the_available_bytes():
    memory = plan(memory_bytes=3_000_000)
    parts = memory.weight_bytes + memory.activation_bytes + memory.sampler_bytes
    assert parts + memory.cache_bytes + memory.headroom_bytes == memory.available_bytes == 3_000_000


def test_image_memory_reduces_the_cache():
    vision = VisionBytes(weights=100_000, workspace=1_200_000)
    memory, blind = plan(memory_bytes=3_600_000, vision=vision), plan(memory_bytes=3_600_000)
    assert memory.weight_bytes == WEIGHTS + 100_000 and memory.vision_bytes == 1_200_000
    used = memory.weight_bytes + memory.activation_bytes + memory.vision_bytes
    used += memory.sampler_bytes + memory.cache_bytes
    assert used + memory.headroom_bytes == 3_600_000
    assert memory.cache_bytes < blind.cache_bytes and blind.vision_bytes == 0
    with pytest.raises(DoesNotFitError, match="3,000,000 for images"):
        plan(memory_bytes=3_000_000, vision=VisionBytes(workspace=3_000_000))


def test_the_pool_takes_the_planned_cache_bytes():
    layers = (FULL, LOCAL, FULL, LOCAL)
    memory = plan(layers=layers, cache_tokens=600)
    pool = KVPool(
        CacheLayout.of(layers, page_tokens=16),
        pages=memory.pages,
        slots=4,
        pages_per_sequence=16,
        type=CacheType.FLOAT32,
        device=CPU,
    )
    taken = sum(pool.layer(i).keys.nbytes + pool.layer(i).values.nbytes for i in range(4))
    assert memory.cache_bytes == taken


def test_with_less_memory_the_cache_shrinks_to_the_last_page_that_fits():
    roomy = plan()
    page = roomy.cache_bytes // 65  # one belongs to no sequence
    needed = roomy.available_bytes - roomy.headroom_bytes
    tight = plan(memory_bytes=needed - 10 * page + 5)
    assert tight.pages == (54,) and tight.headroom_bytes == 5
    assert plan(memory_bytes=needed - 48 * page).pages == (16,)


def test_less_than_one_context_is_refused_with_the_bytes_and_the_fix():
    roomy = plan(cache_tokens=250)
    needed = roomy.available_bytes - roomy.headroom_bytes
    assert plan(memory_bytes=needed).pages == (16,)
    with pytest.raises(DoesNotFitError) as refused:
        plan(memory_bytes=needed - 1)
    text = str(refused.value)
    assert f"{needed:,}" in text and f"{needed - 1:,}" in text and f"{WEIGHTS:,}" in text
    assert "context_tokens" in text


@pytest.mark.parametrize("draft_bytes", [0, 200_000])
def test_weights_that_exceed_the_memory_need_another_model_or_more_memory(draft_bytes):
    draft = SimpleNamespace(
        weight_bytes=draft_bytes, fixed_bytes=draft_bytes, cache_bytes=lambda tokens: 0
    )
    with pytest.raises(DoesNotFitError) as refused:
        plan(memory_bytes=WEIGHTS + draft_bytes - 1, draft=draft)
    assert "smaller quantisation" in str(refused.value)
    assert "Lower `context_tokens`" not in str(refused.value)
    with pytest.raises(DoesNotFitError, match="Lower `context_tokens`"):
        plan(memory_bytes=WEIGHTS + draft_bytes, draft=draft)


def test_a_given_cache_size_is_used_or_refused_but_never_changed():
    memory = plan(cache_tokens=601)
    assert memory.pages == (38,) and memory.cache_tokens == 608
    needed = memory.available_bytes - memory.headroom_bytes
    with pytest.raises(DoesNotFitError):
        plan(cache_tokens=601, memory_bytes=needed - 1)


def test_a_given_cache_size_below_one_context_is_refused():
    with pytest.raises(DoesNotFitError, match="cache_tokens"):
        plan(cache_tokens=249)


def test_a_cache_is_never_larger_than_all_slots_can_use():
    assert plan(cache_tokens=10**6).pages == plan().pages


def test_a_tenth_of_measured_memory_is_left_free(monkeypatch):
    layers = (FULL,) * 16  # so that the cache is larger than the tenth
    roomy = plan(layers=layers)
    needed = roomy.available_bytes - roomy.headroom_bytes
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: needed)
    memory = plan(memory_bytes=None, layers=layers)
    assert memory.available_bytes == needed
    page = roomy.cache_bytes // 65
    assert 0 <= memory.headroom_bytes - 0.1 * needed < page + 1


def test_sliding_groups_are_bounded_by_their_window():
    memory = plan(layers=(FULL, LOCAL), context_tokens=4000)
    full, local = memory.pages
    assert full == 4 * 250
    assert 4 * 2 < local < 4 * 12


PAGE = 16 * 32 * 4  # bytes of one page of one layer: 16 positions of 32 float32
# A window of 32 touches 3 pages wherever it begins, and each slot has begun one more. Two steps of
# 32 rows in flight, which all slots share, are 4 pages.
LOCAL_PAGES = 4 * (3 + 1) + 4


def test_the_cache_of_a_mixed_model_is_its_full_layers_and_the_bound_of_the_others():
    layers = (LOCAL,) * 5 + (FULL,)
    memory = plan(layers=layers, context_tokens=4000)
    assert memory.pages == (LOCAL_PAGES, 4 * 250)
    assert memory.cache_bytes == (5 * (LOCAL_PAGES + 1) + 4 * 250 + 1) * PAGE
    longer = plan(layers=layers, context_tokens=40_000)
    assert longer.cache_bytes == (5 * (LOCAL_PAGES + 1) + 4 * 2500 + 1) * PAGE


def test_five_sliding_layers_of_six_give_far_more_context_in_the_same_bytes():
    context = {"context_tokens": 4000, "slots": 16}
    full = plan(layers=(FULL,) * 6, cache_tokens=4000, **context)
    assert full.cache_bytes == 6 * (250 + 1) * PAGE
    mixed = (LOCAL,) * 5 + (FULL,)
    around = plan(layers=mixed, cache_tokens=4000, **context)
    others = around.available_bytes - around.headroom_bytes - around.cache_bytes
    memory = plan(layers=mixed, memory_bytes=others + full.cache_bytes, **context)
    local = 16 * 4 + 4
    assert memory.pages == (local, 6 * 250 - 5 * local)
    assert memory.cache_tokens == 16 * (6 * 250 - 5 * local) > 4 * 4000


def test_short_of_memory_sliding_groups_shrink_to_one_sequence_before_a_context_is_refused():
    layers, context = (LOCAL,) * 5 + (FULL,), {"context_tokens": 4000}
    roomy = plan(layers=layers, cache_tokens=4000, **context)
    assert roomy.pages == (LOCAL_PAGES, 250)
    needed = roomy.available_bytes - roomy.headroom_bytes
    tight = plan(layers=layers, memory_bytes=needed - 3 * 5 * PAGE, **context)
    assert tight.pages == (LOCAL_PAGES - 3, 250) and tight.headroom_bytes == 0
    one = -(-(31 + 64 - 1) // 16) + 1  # one window and two steps, wherever they begin
    least = needed - (LOCAL_PAGES - one) * 5 * PAGE
    assert plan(layers=layers, memory_bytes=least, **context).pages == (one, 250)
    with pytest.raises(DoesNotFitError, match=f"{least:,}"):
        plan(layers=layers, memory_bytes=least - 1, **context)


def test_image_rows_grow_with_the_contexts_that_fit():
    cross = LayerCache(Cross(2, 100), 2, 8, 8)
    layers, context = (FULL, cross), {"context_tokens": 4000}
    assert plan(layers=layers, cache_tokens=4000, **context).pages == (250, 16)
    assert plan(layers=layers, cache_tokens=6000, **context).pages == (375, 24)
    assert plan(layers=layers, **context).pages == (4 * 250, 4 * 16)


def test_deeper_engines_keep_more_of_a_window():
    one = {"layers": (FULL, LOCAL), "slots": 1, "context_tokens": 4000}
    pages = [plan(depth=depth, **one).pages[1] for depth in (1, 2, 3)]
    assert pages == [5, 7, 9]


KINDS = [(Sliding(37),), (Sliding(5),), (Chunked(48),), (Chunked(16),)]
KINDS += [(Full(), Sliding(20), Chunked(48))]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("slots", [1, 3])
def test_sequences_run_in_the_pages_reserved_for_them(kinds, depth, slots):
    context, step_tokens, page_tokens = 400, 23, 16
    memory = plan(
        layers=tuple(LayerCache(kind, 1, 4, 4) for kind in kinds),
        slots=slots,
        step_tokens=step_tokens,
        context_tokens=context,
        depth=depth,
    )
    assert memory.pages[-1] < slots * context // page_tokens
    cache_manager = KVCacheManager(kinds, memory.pages, page_tokens=page_tokens)
    scheduler = Scheduler(cache_manager, slots=slots, step_tokens=step_tokens)
    for n in range(3 * slots):
        prompt = tuple(range(200)) + (n,) * (20 * n)
        scheduler.add(GenerationRequest(str(n), prompt, StopRules(context - len(prompt))))
    run(scheduler, depth)
    assert scheduler.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_chat_of_a_hundred_windows_stays_within_the_bound_of_one(depth):
    window, step_tokens, page_tokens, context = 8, 16, 4, 1200
    layout = CacheLayout.of(
        [LayerCache(kind, 1, 4, 4) for kind in (Full(), Sliding(window))], page_tokens=page_tokens
    )
    pages = layout.held_pages(context, depth * step_tokens)
    assert pages[1] <= 1 + -(-(window + depth * step_tokens) // page_tokens)
    cache_manager = KVCacheManager(layout.kinds, pages, page_tokens=page_tokens)
    scheduler = Scheduler(cache_manager, slots=1, step_tokens=step_tokens)
    turns, cached = tuple(range(300)), 0
    while len(turns) < 100 * window:
        sequence = scheduler.add(GenerationRequest(str(len(turns)), turns, StopRules(150)))
        run(scheduler, depth)
        cached += sequence.cached
        turns = (*sequence.tokens, *range(40))
    assert cached > 300, "later turns find what earlier ones left"
    assert scheduler.preemptions == 0 and cache_manager.pages_owned == 0


def run(scheduler: Scheduler, depth: int) -> None:
    flying = []
    while scheduler.waiting or scheduler.running:
        step = scheduler.plan()
        if step is not None:
            flying.append(step)
        assert flying, "nothing in flight and nothing to launch: too few pages"
        if step is None or len(flying) >= depth:
            first = flying.pop(0)
            drawn = tuple(Sampled(1) if chunk.samples else None for chunk in first.chunks)
            list(scheduler.retire(first, drawn))
    for step in flying:  # orphans
        list(scheduler.retire(step, tuple(Sampled(1) if c.samples else None for c in step.chunks)))


def test_a_draft_model_takes_memory_from_the_cache():
    draft = SimpleNamespace(
        weight_bytes=5000, fixed_bytes=9000, cache_bytes=lambda tokens: 10 * tokens
    )
    alone, memory = plan(), plan(draft=draft)
    assert memory.draft_bytes == 9000 + 10 * memory.cache_tokens
    for one in (alone, memory):
        parts = one.weight_bytes + one.step_bytes + one.vision_bytes + one.cache_bytes
        assert one.reserved_bytes == parts + one.draft_bytes
    need = memory.reserved_bytes
    assert plan(draft=draft, memory_bytes=need).cache_tokens == memory.cache_tokens
    assert plan(draft=draft, memory_bytes=need - 9000).cache_tokens < memory.cache_tokens


def test_available_memory_is_a_plausible_number_of_bytes():
    assert 10**7 < available_bytes(CPU) < 10**14


def test_a_plan_is_a_value():
    assert dataclasses.replace(plan()) == plan()


def test_recorded_steps_are_part_of_the_activations(monkeypatch):
    before = plan()
    monkeypatch.setattr(memory_plan, "recorded_bytes", lambda *_, **__: 12345)
    memory = plan()
    assert memory.recorded_bytes == 12345
    assert memory.activation_bytes == before.activation_bytes + 12345
    assert memory.headroom_bytes == before.headroom_bytes - 12345
