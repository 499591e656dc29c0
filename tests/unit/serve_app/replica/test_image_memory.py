"""Image memory of a real replica: limits, errors, and release however a request ends."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.multimodal import vision_model
from runtime.errors import (
    ConfigurationError,
    DoesNotFitError,
    GenerationFailedError,
    PromptTooLongError,
    RequestError,
)
from serve_app.api.refusals import refusal
from serve_app.cli.serving_memory import serving_memory
from serve_app.config.settings import MAX_IMAGE_BYTES
from serve_app.messages.tasks import ChatTask, Conversation
from serve_app.replica.loading import load_replica
from serve_app.replica.model_check import check_model
from serve_app.replica.model_files import ModelFiles
from serve_app.replica.replica import ModelReplica
from tests.families.vision_families import VISION_MODELS
from tests.patience import settled, until
from tests.tiny_models import write_tiny_llama
from tests.tiny_vision_model import write_tiny_vision_model
from tests.unit.serve_app.loaded_replicas import loaded, settings
from tests.unit.serve_app.replica.test_vision_replica import GREEDY, answer, likelihoods
from tests.vision_prompts import png

ONE, TWO = png(30, 40), png(40, 30, seed=1)
DAMAGED = ONE[:60] + bytes(20) + ONE[80:]
PIXELS = 4 * 3 * 84 * 84  # of each image, whatever its size


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_vision_model(path)
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that were decoded, in order."""
    files: list[bytes] = []
    real = vision_model.decode

    def recording(data: bytes, limits: Any) -> Any:
        files.append(data)
        return real(data, limits)

    monkeypatch.setattr(vision_model, "decode", recording)
    return files


def image_bytes(replica: ModelReplica) -> int:
    """Host memory in use by the images of requests."""
    return replica._preparer.image_cache.used_bytes


def chat(*content: str | bytes, **change: Any) -> ChatTask:
    parts = tuple(part if isinstance(part, str) else ImagePart(part) for part in content)
    prompt = Conversation((Message("user", parts),))
    given = {"prompt": prompt, "sampling": GREEDY, "max_tokens": 4, **change}
    return ChatTask("1", "demo", **given)


async def test_an_image_of_an_earlier_turn_is_not_decoded_again(file, decoded) -> None:
    messages = [Message("user", (ImagePart(ONE), "a")), Message("assistant", "b")]
    with loaded(file) as replica:
        first = await answer(replica, prompt=Conversation(tuple(messages[:1])))
        second = Conversation((*messages, Message("user", (ImagePart(TWO), "c"))))
        later = await answer(replica, prompt=second)
        assert decoded == [ONE, TWO]
        again = await answer(replica, prompt=Conversation(tuple(messages[:1])))
        assert decoded == [ONE, TWO] and likelihoods(again) == likelihoods(first)
    with loaded(file) as fresh:
        assert likelihoods(await answer(fresh, prompt=second)) == likelihoods(later)
    assert decoded == [ONE, TWO] * 2


async def test_image_memory_is_in_use_only_during_a_request(file) -> None:
    with loaded(file) as replica:
        async with aclosing(replica.generate(chat(ONE, "a", max_tokens=9))) as deltas:
            await anext(deltas)
            assert image_bytes(replica) == len(ONE) + PIXELS
        assert image_bytes(replica) == 0
        await answer(replica, ONE, TWO, "a")
        assert image_bytes(replica) == 0


async def abandoned(replica: ModelReplica) -> None:
    async with aclosing(replica.generate(chat(ONE, "a", max_tokens=9))) as deltas:
        await anext(deltas)


async def cancelled(replica: ModelReplica) -> None:
    request = asyncio.create_task(answer(replica, ONE, TWO, "a"))
    await asyncio.sleep(0)
    request.cancel()
    await asyncio.wait({request})


async def too_long(replica: ModelReplica) -> None:
    with pytest.raises(PromptTooLongError):
        await answer(replica, ONE, "a", context_tokens=20)


async def damaged(replica: ModelReplica) -> None:
    with pytest.raises(RequestError, match="damaged"):
        await answer(replica, ONE, DAMAGED, "a")


async def full(replica: ModelReplica) -> None:
    """The text leaves no room for an answer; the image is prepared before that is known."""
    with pytest.raises(PromptTooLongError):
        await answer(replica, ONE, "hello " * 40)


async def encoder_fails(replica: ModelReplica) -> None:
    with broken_once(replica), pytest.raises(GenerationFailedError):
        await answer(replica, png(9, 9, seed=7), "a")


@pytest.mark.parametrize("ends", [abandoned, cancelled, too_long, damaged, full, encoder_fails])
async def test_image_memory_is_released_however_a_request_ends(file, ends: Callable) -> None:
    with loaded(file) as replica:
        for _ in range(2):
            await ends(replica)
            await until(lambda: not image_bytes(replica))
        assert (await answer(replica, ONE, "a")).usage is not None


async def test_a_request_too_large_alone_is_400_and_one_without_free_memory_waits(
    file, decoded
) -> None:
    budget = len(ONE) + PIXELS
    with loaded(file) as replica:
        replica._preparer.image_cache.budget_bytes = budget  # also below the configurable minimum
        with pytest.raises(RequestError) as alone:
            await answer(replica, ONE, TWO, "a")
        assert refusal(alone.value).status == 400 and f"{budget:,} are" in str(alone.value)
        async with aclosing(replica.generate(chat(ONE, "a", max_tokens=9))) as deltas:
            await anext(deltas)
            waiting = []
            while not any(each.done() for each in waiting):
                content = ((ONE, "a"), (TWO, "a"))[len(waiting) % 2]
                waiting.append(asyncio.create_task(answer(replica, *content)))
                await settled()
            refused = refusal(waiting.pop().exception())
            assert refused.status == 503 and refused.retry_after_s
            assert f"{budget:,}" in refused.message and len(waiting) > 1
            assert (await answer(replica, "text only")).usage is not None
            assert decoded == [ONE]
        for each in asyncio.as_completed(waiting):
            assert (await each).usage is not None


@contextmanager
def broken_once(replica: ModelReplica) -> Iterator[None]:
    """The vision model fails at the next image, and works again after that."""
    tower: Any = replica._model.tower
    original = tower.encode

    def encode(*_: Any) -> Any:
        tower.encode = original
        raise RuntimeError("encoding failed")

    tower.encode = encode
    yield
    assert tower.encode is original, "no image was encoded"


async def test_a_failed_image_is_encoded_again_by_the_next_request(file) -> None:
    with loaded(file) as replica:
        with broken_once(replica), pytest.raises(GenerationFailedError, match="encoding failed"):
            await answer(replica, ONE, "a")
        later = await answer(replica, ONE, "a")
        assert replica.statistics().images_encoded_total == 1
    with loaded(file) as fresh:
        assert likelihoods(later) == likelihoods(await answer(fresh, ONE, "a"))


@pytest.mark.parametrize("family", ["idefics3", "internvl", "llava"])
async def test_images_beyond_the_context_are_refused_before_decoding(
    family, tmp_path, decoded
) -> None:
    VISION_MODELS[family].write(tmp_path)
    files = tmp_path / "tiny.gguf", tmp_path / "mmproj-tiny.gguf"
    with loaded(*files, context_tokens=200) as replica:
        usage = (await answer(replica, png(60, 130), "a")).usage
        assert usage.prompt_tokens > 20
        decoded.clear()
        many = [png(60, 130, seed=number) for number in range(1, 16)]
        for content, change in ((many, {}), (many[:1], {"context_tokens": 15})):
            with pytest.raises(PromptTooLongError) as raised:
                await answer(replica, *content, "a", **change)
            assert refusal(raised.value).status == 400 and "images take" in str(raised.value)
            assert image_bytes(replica) == 0
        assert decoded == []


def test_image_memory_must_hold_the_largest_image(file, tmp_path) -> None:
    least = MAX_IMAGE_BYTES + PIXELS
    check_model(settings(file, image_memory_bytes=least))
    with pytest.raises(
        ConfigurationError, match=r"Model demo: `image_memory_bytes` is 9; .*pixels"
    ):
        check_model(settings(file, image_memory_bytes=9))
    write_tiny_llama(tmp_path / "text.gguf")
    with pytest.raises(ConfigurationError, match=r"`image_memory_bytes`.*has no vision"):
        check_model(settings(tmp_path / "text.gguf", image_memory_bytes=2**30))


@pytest.mark.parametrize(
    "free, cache, pixels",
    [
        (2**30, MAX_IMAGE_BYTES + 2**25, 2**24),
        (2**33, 2**29, 2**33 // 4 // 34),
        (2**40, 2**30, 2**26),
    ],
)
async def test_by_default_images_take_a_share_of_the_free_memory(
    free, cache, pixels, file, monkeypatch
) -> None:
    for module in ("runtime.engine.memory_plan", "serve_app.replica.image_memory"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda device: free)
    with loaded(file) as replica:
        assert replica._preparer.image_cache.budget_bytes == cache
        vision = replica._preparer._model.vision
        assert vision is not None and vision.limits.pixels == pixels
        assert (await answer(replica, ONE, "a")).tokens
    planned = serving_memory(ModelFiles(file), context_tokens=None, slots=2, device="cpu")
    assert planned.refusal is None


def test_the_memory_that_is_shown_leaves_that_of_images_out(file, monkeypatch) -> None:
    free = 9 * 10**8  # less than the smallest images of requests need beside a cache
    monkeypatch.setattr("serve_app.replica.image_memory.available_bytes", lambda device: free)
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: 6 * 10**8)
    planned = serving_memory(ModelFiles(file), context_tokens=None, slots=2, device="cpu")
    assert planned.refusal is not None and "Lower these settings" in planned.refusal


async def test_image_memory_must_be_free_at_the_start(file, monkeypatch) -> None:
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: 2**30)
    with pytest.raises(DoesNotFitError, match=r"images of requests .*`max_image_pixels`"):
        load_replica(settings(file, image_memory_bytes=2**30, max_image_pixels=2**26))
    with loaded(file, image_memory_bytes=2**28, max_image_pixels=2**20) as replica:
        assert (await answer(replica, ONE, "a")).tokens
