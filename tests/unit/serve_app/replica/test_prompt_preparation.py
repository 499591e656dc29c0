"""Preparing prompts in threads: fairness, limits and leases of image memory."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.multimodal.image_cache import ImageCache
from runtime.engine.request import ImageSpan, ResumeState, SamplingParams
from runtime.errors import OverloadedError, RequestError
from serve_app.messages.tasks import (
    ChatTask,
    Conversation,
    PromptSource,
    RawText,
    TokenIds,
    Truncation,
)
from serve_app.replica import prompt_preparation
from serve_app.replica.prompt_preparation import (
    IMAGE_THREADS,
    TENANT_TEXT_THREADS,
    TEXT_THREADS,
    PromptPreparer,
)
from tests.patience import HANG_S, settled, until
from tests.unit.model_zoo.multimodal.test_placeholders import model_of
from tests.vision_prompts import png

WITH_IMAGES = [
    Conversation((Message("user", ("a", ImagePart(b"x"))),)),
    RawText("[img-0]", (ImagePart(b"x"),)),
]
WITHOUT_IMAGES = [Conversation((Message("user", "a"),)), RawText("a"), TokenIds((1,))]


class SlowModel:
    """Prepares prompts once `may` is set; records its threads and its concurrency."""

    tokenizer, template = SimpleNamespace(bos_id=0), object()

    def __init__(self) -> None:
        self.may = threading.Event()
        self.threads: set[threading.Thread] = set()
        self.at_once = self.most_at_once = 0
        self.limits: list[int | None] = []
        self._lock = threading.Lock()

    def prepare(self, messages, *, at_most=None, **_) -> Prompt:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.at_once, self.most_at_once)
            self.threads.add(threading.current_thread())
            self.limits.append(at_most)
        assert self.may.wait(HANG_S)
        with self._lock:
            self.at_once -= 1
        return Prompt((1,))

    def prepare_text(self, text, images=(), *, bos=True, at_most=None, lease=None) -> Prompt:
        return self.prepare((), at_most=at_most)


async def prepared(
    preparer: PromptPreparer, source: PromptSource, max_tokens: int = 9, **task: Any
) -> Prompt:
    task = ChatTask("t", "demo", source, SamplingParams(), **task)
    async with preparer.prepared(task, max_tokens=max_tokens) as prompt:
        return prompt


async def accepted(preparer: PromptPreparer) -> bool:
    """Whether a prompt with an image is prepared, not refused for lack of a slot."""
    try:
        return (await prepared(preparer, WITH_IMAGES[0])).tokens == (1,)
    except OverloadedError:
        return False


async def running(model: SlowModel, count: int) -> None:
    await until(lambda: model.at_once >= count)


@pytest.mark.parametrize("source", WITH_IMAGES)
async def test_few_images_are_decoded_at_once_and_not_on_the_event_loop(source) -> None:
    model = SlowModel()
    preparer = PromptPreparer(model, context_tokens=512)
    asked = [asyncio.create_task(prepared(preparer, source)) for _ in range(9)]
    await running(model, IMAGE_THREADS)
    await settled()
    model.may.set()
    assert [prompt.tokens for prompt in await asyncio.gather(*asked)] == [(1,)] * 9
    assert model.most_at_once == IMAGE_THREADS
    assert threading.current_thread() not in model.threads
    preparer.close()


async def test_texts_do_not_wait_for_images() -> None:
    model = SlowModel()
    preparer = PromptPreparer(model, context_tokens=512)
    images = [asyncio.create_task(prepared(preparer, WITH_IMAGES[0])) for _ in range(9)]
    await running(model, IMAGE_THREADS)
    texts = [asyncio.create_task(prepared(preparer, source)) for source in WITHOUT_IMAGES]
    await running(model, IMAGE_THREADS + 2)
    assert (await texts[2]).tokens == (1,)
    model.may.set()
    await asyncio.gather(*images, *texts)
    preparer.close()


@pytest.mark.parametrize("source", [WITH_IMAGES[0], WITHOUT_IMAGES[0]])
async def test_slow_prompts_of_one_tenant_do_not_delay_another(source) -> None:
    model = SlowModel()
    preparer = PromptPreparer(model, context_tokens=512)
    flood = [asyncio.create_task(prepared(preparer, source, tenant="flood")) for _ in range(30)]
    await running(model, IMAGE_THREADS)
    other = asyncio.create_task(prepared(preparer, source, 5, tenant="other"))
    await settled()
    model.may.set()
    await asyncio.gather(other, *flood)
    assert 5 in model.limits[: TEXT_THREADS + 1]
    preparer.close()


async def test_one_tenant_does_not_occupy_all_threads_for_texts() -> None:
    model = SlowModel()
    preparer = PromptPreparer(model, context_tokens=512)
    source = WITHOUT_IMAGES[0]
    flood = [asyncio.create_task(prepared(preparer, source, tenant="flood")) for _ in range(30)]
    await running(model, TENANT_TEXT_THREADS)
    other = asyncio.create_task(prepared(preparer, source, 5, tenant="other"))
    await running(model, TEXT_THREADS)
    assert 5 in model.limits
    model.may.set()
    await asyncio.gather(other, *flood)
    assert model.most_at_once == TEXT_THREADS
    preparer.close()


async def test_only_continued_answers_wait_behind_too_many_prompts(monkeypatch) -> None:
    monkeypatch.setattr(prompt_preparation, "MAX_WAITING_TEXTS", 1)
    model = SlowModel()
    preparer = PromptPreparer(model, context_tokens=512)
    asked = [
        asyncio.create_task(prepared(preparer, WITHOUT_IMAGES[0]))
        for _ in range(TENANT_TEXT_THREADS + 1)
    ]
    await running(model, TENANT_TEXT_THREADS)
    with pytest.raises(OverloadedError, match="4 prompts are running or waiting"):
        await prepared(preparer, WITHOUT_IMAGES[0])
    resumed = prepared(preparer, WITHOUT_IMAGES[0], resume=ResumeState())
    asked.append(asyncio.create_task(resumed))
    await settled()
    model.may.set()
    assert [prompt.tokens for prompt in await asyncio.gather(*asked)] == [(1,)] * 5
    preparer.close()


async def test_slow_prompts_of_one_model_do_not_delay_those_of_another() -> None:
    slow, quick = SlowModel(), SlowModel()
    quick.may.set()
    preparers = [
        PromptPreparer(slow, context_tokens=512),
        PromptPreparer(quick, context_tokens=512),
    ]
    delayed = [asyncio.create_task(prepared(preparers[0], WITHOUT_IMAGES[0])) for _ in range(100)]
    await running(slow, TENANT_TEXT_THREADS)
    assert (await prepared(preparers[1], WITHOUT_IMAGES[0])).tokens == (1,)
    assert not any(prompt.done() for prompt in delayed)
    slow.may.set()
    await asyncio.gather(*delayed)
    for preparer in preparers:
        preparer.close()


async def test_an_aborted_request_keeps_its_slot_until_its_thread_is_done(monkeypatch) -> None:
    monkeypatch.setattr(prompt_preparation, "MAX_WAITING_IMAGES", 0)
    model = SlowModel()
    preparer = PromptPreparer(model, context_tokens=512)
    asked = [asyncio.create_task(prepared(preparer, WITH_IMAGES[0])) for _ in range(2)]
    await running(model, 2)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    with pytest.raises(OverloadedError, match="2 prompts with images"):
        await prepared(preparer, WITH_IMAGES[0])
    model.may.set()
    await until(lambda: accepted(preparer))
    preparer.close()


async def test_a_refused_image_frees_its_slot(monkeypatch) -> None:
    monkeypatch.setattr(prompt_preparation, "MAX_WAITING_IMAGES", 0)
    model = SlowModel()
    model.may.set()
    preparer = PromptPreparer(model, context_tokens=512)

    def refuse(*_, **__) -> Prompt:
        raise RequestError("The image is truncated.")

    model.prepare = refuse
    for _ in range(9):
        with pytest.raises(RequestError, match="truncated"):
            await until(lambda: accepted(preparer))
    preparer.close()


async def test_tokens_of_an_earlier_answer_count_against_the_limit() -> None:
    model = SlowModel()
    model.may.set()
    preparer = PromptPreparer(model, context_tokens=512)
    for after, limit in (((), 9), ((1, 2), 7), ((1,) * 12, 0)):
        source = Conversation((Message("user", "a"),), after=after)
        await prepared(preparer, source)
        assert model.limits[-1] == limit
    preparer.close()


async def test_image_files_of_waiting_prompts_count_against_the_budget() -> None:
    model = SlowModel()
    preparer = PromptPreparer(model, ImageCache(budget_bytes=100), context_tokens=512)
    source = RawText("[img-0]", (ImagePart(bytes(30)),))
    asked = [asyncio.create_task(prepared(preparer, source, tenant=name)) for name in "abc"]
    await running(model, IMAGE_THREADS)
    assert preparer.image_cache.used_bytes == 90
    with pytest.raises(RequestError, match="at most 100"):
        await prepared(preparer, RawText("[img-0]", (ImagePart(bytes(101)),)))
    assert (await prepared(preparer, WITHOUT_IMAGES[2])).tokens == (1,), (
        "texts need no image memory"
    )
    asked[2].cancel()  # while it waits
    await asyncio.wait({asked[2]})
    assert preparer.image_cache.used_bytes == 60
    model.may.set()
    await asyncio.gather(*asked[:2])
    assert preparer.image_cache.used_bytes == 0
    preparer.close()


async def remaining_images(model: ChatModel, image_cache: ImageCache, turns: int) -> int:
    """The images in the prompt of a truncated chat with one image in each turn."""
    images = [ImagePart(png(40, 60, seed=turn)) for turn in range(turns)]
    turn = [(Message("user", (image,)), Message("assistant", "x")) for image in images]
    task = ChatTask(
        "t",
        "demo",
        Conversation(tuple(message for pair in turn for message in pair)[:-1]),
        SamplingParams(),
        truncation=Truncation(turns=True),
    )
    preparer = PromptPreparer(model, image_cache, context_tokens=4096)
    async with preparer.prepared(task, max_tokens=4096) as prompt:
        shown = [span.digest for span in prompt.spans]
    preparer.close()
    assert image_cache.used_bytes == 0
    last = [model.prepare([Message("user", (image,))]).images[0] for image in images[-len(shown) :]]
    assert shown == [image.digest for image in last], "those of the last turns"
    return len(shown)


async def test_a_truncated_chat_has_as_many_images_as_the_model_accepts() -> None:
    for turns in range(1, 10):
        model = model_of("mllama", most_images=4)
        assert await remaining_images(model, ImageCache(), turns) == min(turns, 4)


@pytest.mark.parametrize("cached", [False, True])
async def test_a_truncated_chat_has_as_many_images_as_fit_in_memory(cached: bool) -> None:
    model = model_of("qwen")
    [image] = model.prepare([Message("user", (ImagePart(png(40, 60)),))]).images
    files = sum(len(png(40, 60, seed=turn)) for turn in range(9))
    image_cache = ImageCache(budget_bytes=files + 5 * image.pixels.nbytes)
    assert await remaining_images(model, image_cache, 5) == 5
    fresh = ImageCache(budget_bytes=image_cache.budget_bytes)
    assert await remaining_images(model, image_cache if cached else fresh, 9) == 5


async def test_an_aborted_request_frees_its_image_memory_once_its_thread_is_done() -> None:
    model = SlowModel()
    preparer = PromptPreparer(model, ImageCache(budget_bytes=100), context_tokens=512)
    asked = asyncio.create_task(prepared(preparer, RawText("[img-0]", (ImagePart(bytes(60)),))))
    await running(model, 1)
    asked.cancel()
    await asyncio.wait({asked})
    assert preparer.image_cache.used_bytes == 60
    model.may.set()
    await until(lambda: preparer.image_cache.used_bytes == 0)
    preparer.close()


async def test_a_placeholder_at_the_start_of_a_prompt_is_not_dropped_as_bos() -> None:
    """A vocabulary without placeholder tokens may use the BOS token for images."""
    model = SlowModel()
    span = ImageSpan(0, 2, False, b"d")
    model.prepare = lambda *_, **__: Prompt((0, 0, 5), (span,))
    preparer = PromptPreparer(model, context_tokens=512)
    prompt = await prepared(preparer, Conversation((Message("user", "a"),), after=(7, 8)))
    assert prompt.tokens == (7, 8, 0, 0, 5) and prompt.spans[0].start == 2
    preparer.close()
