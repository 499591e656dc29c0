"""Images in the loop: other requests continue while one is encoded or fails."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable

import pytest

from runtime.engine.async_engine import AsyncEngine, failure
from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.request import FinishReason, GenerationRequest, ImageSpan, StopRules
from runtime.engine.request_limits import admissible
from runtime.engine.scheduler import Scheduler
from runtime.errors import (
    EngineDeadError,
    GenerationFailedError,
    ModelUnavailableError,
    RequestError,
)
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_manager import KVCacheManager
from runtime.vision.encoder import LocalEncoder
from runtime.vision.feature_cache import FeatureStore
from tests.patience import HANG_S, until
from tests.unit.runtime.engine.fake_runner import VOCABULARY, PretendRunner, answer
from tests.unit.runtime.engine.test_async_engine import collect, request
from tests.unit.runtime.engine.test_engine import token_bytes
from tests.unit.runtime.vision.fake_tower import PretendTower, picture
from tests.unit.runtime.vision.test_encoder import CPU
from tests.unit.runtime.vision.test_feature_cache import ManualEncoder, store_of

ROWS = 3
LIMITS = EngineLimits(64, VOCABULARY, max_live=40, image_rows=ROWS, slots=40)


def looking_at(name: str, *numbers: int, count: int = 10, ask: int = 1) -> GenerationRequest:
    """Two tokens, then each image and one token after it, and a question of `ask` tokens."""
    prompt, spans = [1, 2], []
    for number in numbers:
        spans.append(ImageSpan(len(prompt), ROWS, False, bytes([number])))
        prompt += [0] * ROWS + [3]
    images = tuple(picture(number) for number in dict.fromkeys(numbers))
    prompt += range(10, 10 + ask)
    return GenerationRequest(
        name, tuple(prompt), StopRules(count), spans=tuple(spans), images=images
    )


def engine_of(store: FeatureStore, *, slots: int = 4, depth: int = 2) -> Engine:
    scheduler = Scheduler(
        KVCacheManager([Full()], [64], page_tokens=4), slots=slots, step_tokens=16
    )
    return Engine(
        scheduler,
        PretendRunner(),
        token_bytes=token_bytes,
        limits=LIMITS,
        depth=depth,
        features=store,
    )


@contextlib.contextmanager
def seeing(
    tower: PretendTower,
    *,
    images_kept: int = 10,
    clock: Callable[[], float] = time.monotonic,
    **options,
):
    encoder = LocalEncoder(tower, device=CPU, weight_bytes=0, clock=clock)
    budget = images_kept * ROWS * encoder.limits.row_bytes
    store = FeatureStore(encoder, budget_bytes=budget, clock=clock)
    engine = AsyncEngine(engine_of(store, **options), stall_s=300.0, clock=clock)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


async def entered(tower: PretendTower) -> None:
    assert await asyncio.to_thread(tower.entered.acquire, timeout=HANG_S)


async def test_text_streams_from_first_to_last_while_an_image_is_encoded() -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    with seeing(tower, slots=2) as engine:
        # More of them than slots, and all before the text.
        waiting = [asyncio.create_task(collect(engine, looking_at(f"i{n}", n))) for n in (1, 2, 3)]
        await entered(tower)
        for name in ("one", "other"):
            delta = await collect(engine, request(name))
            assert list(delta.tokens) == answer((1, 2, len(name)), 20)
        assert not any(task.done() for task in waiting) and tower.encoded == []
        gate.release(100)
        for number, task in enumerate(waiting, 1):
            delta = await task
            asked = looking_at(f"i{number}", number)
            assert list(delta.tokens) == answer(asked.prompt, 10)
    assert tower.encoded == [1, 2, 3]


async def test_a_second_turn_encodes_only_new_images() -> None:
    tower = PretendTower()
    with seeing(tower, images_kept=1) as engine:
        await collect(engine, looking_at("a", 1))
        assert tower.encoded == [1]
        # Its features make room for others, but its pages are still there.
        await collect(engine, looking_at("b", 1, 2))
        assert tower.encoded == [1, 2]
        delta = await collect(engine, looking_at("c", 1, 2, ask=4))
        assert tower.encoded == [1, 2]
        assert delta.usage is not None and delta.usage.cached_tokens == 8


async def test_a_partly_cached_image_is_encoded_once_for_the_rest() -> None:
    tower = PretendTower()
    with seeing(tower, images_kept=1) as engine:
        await collect(engine, looking_at("a", 1, count=1))  # 7 tokens: one page
        await collect(engine, looking_at("b", 2))
        delta = await collect(engine, looking_at("c", 1))
        assert delta.usage is not None and delta.usage.cached_tokens == 4
        assert tower.encoded == [1, 2, 1]


async def test_many_requests_about_one_image_encode_it_once() -> None:
    tower = PretendTower()
    with seeing(tower) as engine:
        asked = [looking_at(f"r{n}", 7, 7, ask=n) for n in range(1, 9)]
        deltas = await asyncio.gather(*[collect(engine, one) for one in asked])
        for one, delta in zip(asked, deltas, strict=True):
            assert list(delta.tokens) == answer(one.prompt, 10)
    assert tower.encoded == [7]


async def test_an_image_that_fails_ends_only_the_requests_with_it() -> None:
    tower = PretendTower(broken=frozenset([2]))
    with seeing(tower) as engine:
        asked = [looking_at("a", 1), looking_at("b", 1, 2), looking_at("c", 3), request("d")]
        good, bad, other, text = await asyncio.gather(*[collect(engine, r) for r in asked])
        assert bad.finish is FinishReason.FAILED and bad.usage is not None
        assert bad.error is not None and "Image 2 of 2" in bad.error
        assert "upside down" in bad.error
        for delta in (good, other, text):
            assert delta.finish is FinishReason.LENGTH and delta.error is None
        again = await collect(engine, looking_at("b", 1, 2))
        assert again.finish is FinishReason.FAILED
        await until(lambda: engine.statistics().pages_owned == 0)
    assert tower.encoded.count(2) == 2, "a later request lets it be tried again"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelUnavailableError("no encoder"), ModelUnavailableError),  # answered with 503
        (RequestError("odd"), GenerationFailedError),
        (ValueError("odd"), GenerationFailedError),
    ],
)
async def test_an_image_that_may_be_encoded_later_is_no_failure_of_generation(
    error, expected
) -> None:
    with seeing(PretendTower(broken=frozenset([1]), error=error)) as engine:
        delta = await collect(engine, looking_at("a", 1))
        assert type(failed := failure(engine, delta)) is expected
        assert "Image 1 of 1 could not be encoded: " in str(failed)


async def test_leaving_while_an_image_is_encoded_does_not_affect_other_requests() -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    with seeing(tower) as engine:
        first = asyncio.create_task(collect(engine, looking_at("a", 1)))
        await entered(tower)
        second = asyncio.create_task(collect(engine, looking_at("b", 2)))
        third = asyncio.create_task(collect(engine, looking_at("c", 3)))
        await until(lambda: engine.statistics().images_waiting == 3)
        first.cancel()
        second.cancel()
        await until(lambda: engine.statistics().images_waiting == 2)
        gate.release(100)
        delta = await third
        assert list(delta.tokens) == answer(looking_at("c", 3).prompt, 10)
        await until(lambda: engine.statistics().pages_owned == 0)
    assert tower.encoded == [1, 3]


@pytest.mark.unfinished("the engine is closed during a request")
async def test_an_engine_closes_while_an_image_is_encoded() -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    with seeing(tower) as engine:
        task = asyncio.create_task(collect(engine, looking_at("a", 1)))
        await entered(tower)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        delta = await task
        assert delta.finish is FinishReason.FAILED
        gate.release()
        await closing


async def test_a_hanging_encoder_fails_the_check() -> None:
    gate = threading.Semaphore(0)
    tower, now_s = PretendTower(gate=gate), 0.0
    with seeing(tower, clock=lambda: now_s) as engine:
        task = asyncio.create_task(collect(engine, looking_at("a", 1)))
        await entered(tower)
        await until(lambda: engine._busy_since is None)  # it waits for the image alone
        now_s += 299.0
        engine.check()
        now_s += 2.0
        with pytest.raises(EngineDeadError, match="no part of an image was encoded for 300 s"):
            engine.check()
        gate.release()
        await task
        engine.check()


async def test_an_image_may_take_longer_than_a_hang_while_its_parts_are_encoded() -> None:
    gate = threading.Semaphore(0)
    tower, now_s = PretendTower(gate=gate), 0.0
    tower.parts = 4
    with seeing(tower, clock=lambda: now_s) as engine:
        task = asyncio.create_task(collect(engine, looking_at("a", 1)))
        try:
            for _ in range(tower.parts):
                await entered(tower)
                now_s += 299.0
                engine.check()
                gate.release()
        finally:
            gate.release(100)
        await task


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": (1,) * 4},
        {"spans": (ImageSpan(2, 3, False, b"\x01"), ImageSpan(4, 3, False, b"\x01"))},
        {"spans": (ImageSpan(2, 3, False, b"\x01", first_row=1),)},
        {"spans": (ImageSpan(2, 3, True, b"\x01"),)},
        {"spans": (ImageSpan(2, 1, False, b"\x02", cross_rows=3),)},
        {"spans": (ImageSpan(2, 1, False, b"\x01", cross_rows=3, cross_padding=1),)},
        {"images": (picture(1, ROWS + 1),)},
    ],
)
def test_impossible_spans_never_reach_the_engine(change) -> None:
    asked = looking_at("a", 1)
    limits = dataclasses.replace(LIMITS, step_tokens=2)
    assert admissible(asked, limits, live=0).spans == asked.spans
    with pytest.raises(AssertionError):
        admissible(dataclasses.replace(asked, **change), limits, live=0)


def test_a_model_without_vision_refuses_images() -> None:
    scheduler = Scheduler(KVCacheManager([Full()], [64], page_tokens=4), slots=4, step_tokens=16)
    limits = EngineLimits(context_tokens=64, vocab_size=VOCABULARY, max_live=8)
    engine = AsyncEngine(
        Engine(scheduler, PretendRunner(), token_bytes=token_bytes, limits=limits, depth=1)
    )
    engine.start()
    with contextlib.closing(engine), pytest.raises(RequestError, match="does not support images"):
        asyncio.run(collect(engine, looking_at("a", 1)))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_images_of_a_request_are_encoded_one_by_one_if_memory_is_short(depth: int) -> None:
    store, encoder = store_of(ROWS)
    engine, box = engine_of(store, depth=depth), []
    engine.add(looking_at("a", 1, 2, 3), box.append, arrived=0)
    for number in (1, 2, 3):
        while engine.step():
            pass
        assert encoder.asked == list(range(1, number + 1))
        encoder.finish(number)
    while engine.step():
        pass
    assert [token for delta in box for token in delta.tokens] == answer(
        looking_at("a", 1, 2, 3).prompt, 10
    )
    assert isinstance(encoder, ManualEncoder) and store.pending == 0
