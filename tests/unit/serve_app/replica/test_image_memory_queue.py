"""Requests wait for image memory by turns, and hold none while they wait."""

import asyncio
import random

import pytest

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.multimodal.image_cache import ImageCache, ImageLease
from runtime.engine.request import SamplingParams
from runtime.errors import OverloadedError, RequestError
from serve_app.messages.tasks import ChatTask, Conversation
from serve_app.replica.image_memory_queue import ImageMemoryQueue
from serve_app.replica.prompt_preparation import PromptPreparer
from tests.patience import settled
from tests.unit.model_zoo.multimodal.test_placeholders import model_of
from tests.vision_prompts import png


class Queue:
    """A queue for a cache of 100 bytes."""

    def __init__(self) -> None:
        self.cache = ImageCache(budget_bytes=100)
        self._queue = ImageMemoryQueue(self.cache)

    def ask(
        self, file_bytes: int, tenant: str = "", *, ahead: int = 0, limited: bool = False
    ) -> asyncio.Task[ImageLease]:
        return asyncio.create_task(
            self._queue.lease(file_bytes, ahead=ahead, salt=b"", tenant=tenant, limited=limited)
        )


async def test_a_request_gets_its_memory_once_others_have_returned_theirs() -> None:
    queue = Queue()
    first = await queue.ask(30, "a", ahead=50)
    waiting = queue.ask(40, "b")
    await settled()
    assert not waiting.done() and queue.cache.used_bytes == 80
    first.close()
    lease = await waiting
    assert queue.cache.used_bytes == 40
    lease.close()
    assert queue.cache.used_bytes == 0 and not queue.cache.taken


async def test_memory_ahead_is_for_the_next_reservation() -> None:
    queue = Queue()
    lease = await queue.ask(30, ahead=60)
    lease.reserve(70)
    assert queue.cache.used_bytes == 100
    lease.close()
    lease = await queue.ask(30, ahead=60)
    lease.reserve(20)
    assert queue.cache.used_bytes == 50


async def test_a_large_request_is_not_overtaken_by_later_small_ones() -> None:
    queue = Queue()
    running = [await queue.ask(30, name) for name in "ab"]
    large, small = queue.ask(90, "c"), queue.ask(10, "d")
    await settled()
    running[0].close()
    await settled()
    assert not large.done() and not small.done()
    running[1].close()
    assert (await large, await small) and queue.cache.used_bytes == 100


async def test_the_requests_of_one_tenant_do_not_delay_those_of_another() -> None:
    queue = Queue()
    flood = [queue.ask(30, "flood") for _ in range(5)]
    await settled()
    assert [each.done() for each in flood] == [True, True, False, False, False]
    (await queue.ask(30, "other")).close()
    full = await queue.ask(40, "another")
    last = queue.ask(30, "other")
    (await flood[0]).close()
    await settled()
    assert last.done() and not flood[2].done(), "the tenant with less comes first"
    for lease in (await last, full):
        lease.close()
    for each in flood[1:]:
        (await each).close()


async def test_only_a_part_of_the_budget_waits_beside_it() -> None:
    queue = Queue()
    first = await queue.ask(100)
    waiting = [queue.ask(10, "flood", limited=True) for _ in range(4)]
    await settled()
    with pytest.raises(OverloadedError, match=r"100 of the 100 bytes .* 2 requests wait"):
        await waiting.pop()
    with pytest.raises(OverloadedError):
        await waiting.pop()
    waiting += [queue.ask(10, "other", limited=True), queue.ask(10, "flood")]
    with pytest.raises(RequestError, match="at most 100"):
        await queue.ask(101)
    first.close()
    for each in waiting:
        (await each).close()


async def test_a_request_whose_turn_it_is_need_not_find_room_to_wait() -> None:
    queue = Queue()
    first = await queue.ask(60, "flood")
    waiting = queue.ask(50, "flood")
    await settled()
    (await queue.ask(40, "other", limited=True)).close()
    first.close()
    (await waiting).close()


@pytest.mark.parametrize("served", [False, True])
async def test_a_request_that_leaves_takes_no_memory(served: bool) -> None:
    queue = Queue()
    first, leaving, other = await queue.ask(100), queue.ask(60), queue.ask(60)
    await settled()
    if served:
        first.close()
        queue._queue._serve()
    leaving.cancel()
    first.close()
    (await other).close()
    assert leaving.cancelled() and queue.cache.used_bytes == 0
    assert len(queue._queue._waiting) == 0


async def test_pixels_that_do_not_fit_yet_are_waited_for_without_holding_files() -> None:
    model = model_of("qwen")
    files = [png(40, 60, seed=seed) for seed in range(3)]
    [image] = model.prepare([Message("user", (ImagePart(files[0]),))]).images
    budget = 2 * (len(max(files, key=len)) + image.pixels.nbytes) - 1  # for one at a time
    preparer = PromptPreparer(model, ImageCache(budget_bytes=budget), context_tokens=4096)

    async def shown(file: bytes) -> bytes:
        source = Conversation((Message("user", (ImagePart(file),)),))
        task = ChatTask("t", "demo", source, SamplingParams(), tenant=str(files.index(file)))
        async with preparer.prepared(task, max_tokens=4096) as prompt:
            await settled()
            return prompt.images[0].digest

    alone = [model.prepare([Message("user", (ImagePart(each),))]).images[0] for each in files]
    assert await asyncio.gather(*map(shown, files)) == [each.digest for each in alone]
    assert preparer.image_cache.used_bytes == 0
    preparer.close()


async def test_all_requests_get_memory_in_the_end() -> None:
    draw, queue = random.Random(3), Queue()

    async def one() -> None:
        lease = await queue.ask(draw.randrange(60), draw.choice("abc"), ahead=draw.randrange(40))
        await asyncio.sleep(0)
        lease.close()

    await asyncio.gather(*(one() for _ in range(200)))
    assert queue.cache.used_bytes == 0 and not queue.cache.taken
