"""Prompts made in threads: few with images at once, and none of them on the event loop."""

import asyncio
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import Prompt
from model_zoo.multimodal.image_cache import ImageCache
from runtime.engine.request import ImageSpan
from runtime.errors import OverloadedError, RequestError
from serve_app.gateway.tasks import Conversation, RawText, TokenIds
from serve_app.replica import prompt_preparation as preparing
from serve_app.replica.prompt_preparation import Preparer
from tests.patience import HANG_S, until

SEEING = [
    Conversation((Message("user", ("a", ImagePart(b"x"))),)),
    RawText("[img-0]", (ImagePart(b"x"),)),
]
BLIND = [Conversation((Message("user", "a"),)), RawText("a"), TokenIds((1,))]


class SlowModel:
    """Makes no prompt before it may; notes the threads it works in, and how many at once."""

    tokenizer = SimpleNamespace(bos_id=0)

    def __init__(self) -> None:
        self.may = threading.Event()
        self.threads: set[threading.Thread] = set()
        self.at_once = self.most_at_once = 0
        self.rooms: list[int | None] = []
        self._lock = threading.Lock()

    def prepare(
        self, messages, *, thinking=None, variables=None, at_most=None, now=None, lease=None
    ) -> Prompt:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.at_once, self.most_at_once)
            self.threads.add(threading.current_thread())
            self.rooms.append(at_most)
        assert self.may.wait(HANG_S)
        with self._lock:
            self.at_once -= 1
        return Prompt((1,))

    def prepare_text(self, text, images=(), *, at_most=None, lease=None) -> Prompt:
        return self.prepare((), at_most=at_most)


async def made(preparer: Preparer, source, at_most: int = 9, tenant: str = "") -> Prompt:
    with closing(preparer.lease(source)) as lease:
        return await preparer.prompt(source, at_most=at_most, lease=lease, tenant=tenant)


async def running(model: SlowModel, count: int) -> None:
    await until(lambda: model.at_once >= count)


@pytest.mark.parametrize("source", SEEING)
async def test_few_images_are_decoded_at_once_and_not_on_the_event_loop(source) -> None:
    model = SlowModel()
    preparer = Preparer(model)
    asked = [asyncio.create_task(made(preparer, source)) for _ in range(9)]
    await running(model, preparing.IMAGE_THREADS)
    await asyncio.sleep(0.05)
    model.may.set()
    assert [prompt.tokens for prompt in await asyncio.gather(*asked)] == [(1,)] * 9
    assert model.most_at_once == preparing.IMAGE_THREADS
    assert threading.current_thread() not in model.threads
    preparer.close()


async def test_texts_do_not_wait_for_images() -> None:
    model = SlowModel()
    preparer = Preparer(model)
    images = [asyncio.create_task(made(preparer, SEEING[0])) for _ in range(9)]
    await running(model, preparing.IMAGE_THREADS)
    texts = [asyncio.create_task(made(preparer, source)) for source in BLIND]
    await running(model, preparing.IMAGE_THREADS + 2)
    assert (await texts[2]).tokens == (1,)
    model.may.set()
    await asyncio.gather(*images, *texts)
    preparer.close()


@pytest.mark.parametrize("source", [SEEING[0], BLIND[0]])
async def test_slow_prompts_of_one_tenant_let_another_one_s_pass(source) -> None:
    model = SlowModel()
    preparer = Preparer(model)
    flood = [asyncio.create_task(made(preparer, source, tenant="flood")) for _ in range(30)]
    await until(lambda: preparer.at_work == 30)
    await running(model, preparing.IMAGE_THREADS)
    other = asyncio.create_task(made(preparer, source, 5, tenant="other"))
    await until(lambda: preparer.at_work == 31)
    model.may.set()
    await asyncio.gather(other, *flood)
    assert 5 in model.rooms[: preparing.TEXT_THREADS + 1]
    preparer.close()


async def test_slow_prompts_of_one_model_do_not_delay_those_of_another() -> None:
    slow, quick = SlowModel(), SlowModel()
    quick.may.set()
    preparers = [Preparer(slow), Preparer(quick)]
    delayed = [asyncio.create_task(made(preparers[0], BLIND[0])) for _ in range(100)]
    await running(slow, preparing.TEXT_THREADS)
    assert (await made(preparers[1], BLIND[0])).tokens == (1,)
    assert not any(prompt.done() for prompt in delayed)
    slow.may.set()
    await asyncio.gather(*delayed)
    for preparer in preparers:
        preparer.close()


async def test_who_leaves_makes_no_room_before_the_work_is_done(monkeypatch) -> None:
    monkeypatch.setattr(preparing, "MOST_WAITING", 0)
    model = SlowModel()
    preparer = Preparer(model)
    asked = [asyncio.create_task(made(preparer, SEEING[0])) for _ in range(2)]
    await running(model, 2)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    with pytest.raises(OverloadedError, match="2 prompts with images"):
        await made(preparer, SEEING[0])
    model.may.set()
    await until(lambda: not preparer.at_work)
    assert (await made(preparer, SEEING[0])).tokens == (1,)
    preparer.close()


async def test_a_bad_image_makes_room_again(monkeypatch) -> None:
    monkeypatch.setattr(preparing, "MOST_WAITING", 0)
    model = SlowModel()
    model.may.set()
    preparer = Preparer(model)

    def refuse(*_, **__) -> Prompt:
        raise RequestError("The image is truncated.")

    model.prepare = refuse
    for _ in range(9):
        with pytest.raises(RequestError, match="truncated"):
            await made(preparer, SEEING[0])
        await until(lambda: not preparer.at_work)
    preparer.close()


async def test_tokens_of_an_earlier_answer_take_of_the_room() -> None:
    model = SlowModel()
    model.may.set()
    preparer = Preparer(model)
    for after, room in (((), 9), ((1, 2), 7), ((1,) * 12, 0)):
        source = Conversation((Message("user", "a"),), after=after)
        await made(preparer, source)
        assert model.rooms[-1] == room
    preparer.close()


async def test_files_of_waiting_prompts_take_of_the_budget_until_their_turn_is_over() -> None:
    model = SlowModel()
    preparer = Preparer(model, ImageCache(budget_bytes=100))
    source = RawText("[img-0]", (ImagePart(bytes(30)),))
    asked = [asyncio.create_task(made(preparer, source)) for _ in range(3)]
    await running(model, preparing.IMAGE_THREADS)
    assert preparer.image_cache.used_bytes == 90
    with pytest.raises(OverloadedError, match="no room for 30 more"):
        preparer.lease(source)
    with pytest.raises(RequestError, match="at most 100"):
        preparer.lease(RawText("[img-0]", (ImagePart(bytes(101)),)))
    assert (await made(preparer, BLIND[2])).tokens == (1,), "texts need no room"
    asked[2].cancel()  # before its turn
    await asyncio.wait({asked[2]})
    assert preparer.image_cache.used_bytes == 60
    model.may.set()
    await asyncio.gather(*asked[:2])
    assert preparer.image_cache.used_bytes == 0
    preparer.close()


async def test_who_leaves_gives_room_back_once_the_work_is_done() -> None:
    model = SlowModel()
    preparer = Preparer(model, ImageCache(budget_bytes=100))
    asked = asyncio.create_task(made(preparer, RawText("[img-0]", (ImagePart(bytes(60)),))))
    await running(model, 1)
    asked.cancel()
    await asyncio.wait({asked})
    assert preparer.image_cache.used_bytes == 60
    model.may.set()
    await until(lambda: not preparer.at_work)
    assert preparer.image_cache.used_bytes == 0
    preparer.close()


async def test_an_image_that_opens_a_prompt_is_never_taken_for_the_beginning_of_a_text() -> None:
    """Its places may have the same token, where a vocabulary has none for them."""
    model = SlowModel()
    span = ImageSpan(0, 2, False, b"d")
    model.prepare = lambda *_, **__: Prompt((0, 0, 5), (span,))
    preparer = Preparer(model)
    prompt = await made(preparer, Conversation((Message("user", "a"),), after=(7, 8)))
    assert prompt.tokens == (7, 8, 0, 0, 5) and prompt.spans[0].start == 2
    preparer.close()
