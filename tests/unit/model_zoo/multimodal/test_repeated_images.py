"""Repeated images are not decoded again, and none is decoded without memory for it."""

import dataclasses
from contextlib import closing
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.images.normalise import CLIP, STANDARD
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.llava.image_processor import LlavaProcessor
from model_zoo.multimodal import vision_model as module
from model_zoo.multimodal.image_cache import ImageCache
from runtime.errors import OverloadedError, PromptTooLongError, RequestError
from tests.pictures import photo
from tests.unit.model_zoo.multimodal.test_placeholders import ONE, TWO, model_of, user
from tests.vision_prompts import png

TURN = [*user("This?", ONE), Message("assistant", "A hill."), *user(TWO, "And this?")]
# Settings of LLaVA 1.5, SmolVLM and InternVL 3.
REAL = {
    "llava": LlavaProcessor(336, 576),
    "idefics3": Idefics3Processor(512, 2048, 64),
    "internvl": InternVLProcessor(448, 256, CLIP),
}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that were decoded, in order."""
    files: list[bytes] = []
    real = module.decode

    def noted(data: bytes, limits: Any) -> Any:
        files.append(data)
        return real(data, limits)

    monkeypatch.setattr(module, "decode", noted)
    return files


def asked(
    model: ChatModel, image_cache: ImageCache, talk: Any, *, salt: bytes = b"", **options: Any
) -> Prompt:
    with closing(image_cache.lease(salt=salt)) as lease:
        return model.prepare(talk, lease=lease, **options)


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "internvl", "llava", "qwen"])
def test_images_of_earlier_turns_are_not_decoded_again(family: str, decoded: list[bytes]) -> None:
    model, image_cache = model_of(family), ImageCache(budget_bytes=2**20)
    first = asked(model, image_cache, TURN[:1])
    assert decoded == [ONE.data]
    second = asked(model, image_cache, TURN)
    assert decoded == [ONE.data, TWO.data]
    assert second.images[0] is first.images[0]
    assert second.tokens == model.prepare(TURN).tokens
    assert [s.digest for s in second.spans] == [s.digest for s in model.prepare(TURN).spans]


def test_the_same_file_twice_in_one_request_is_decoded_once(decoded: list[bytes]) -> None:
    prompt = asked(
        model_of("qwen"),
        ImageCache(),
        [*user(ONE, ONE), Message("assistant", "x"), *user(ONE)],
    )
    assert decoded == [ONE.data] and len(prompt.images) == 1 and len(prompt.spans) == 3


def test_images_are_cached_per_settings_and_vision_model(decoded: list[bytes]) -> None:
    model, image_cache = model_of("gemma3"), ImageCache()
    other = dataclasses.replace(model.vision.processor, normalisation=STANDARD)
    wider = dataclasses.replace(model.vision.processor, rows=9)
    for change in ({}, {"processor": other}, {"processor": wider}, {"name": b"another"}):
        vision = dataclasses.replace(model.vision, **change)
        asked(dataclasses.replace(model, vision=vision), image_cache, TURN[:1])
    assert decoded == [ONE.data] * 3, "the second has the settings of the first"


def test_images_are_shared_only_under_the_same_salt(decoded: list[bytes]) -> None:
    model, image_cache = model_of("gemma3"), ImageCache()
    prompts = [asked(model, image_cache, TURN[:1], salt=s) for s in (b"", b"one", b"two", b"one")]
    assert decoded == [ONE.data] * 3
    assert len({prompt.images[0].digest for prompt in prompts}) == 3
    assert all(prompt.spans[0].digest == prompt.images[0].digest for prompt in prompts)


def test_two_files_of_the_same_pixels_are_one_image(decoded: list[bytes]) -> None:
    bitmap = BytesIO()
    Image.open(BytesIO(ONE.data)).save(bitmap, "BMP")
    prompt = asked(model_of("gemma3"), ImageCache(), user(ONE, ImagePart(bitmap.getvalue())))
    assert len(decoded) == 2 and len(prompt.images) == 1 and len(prompt.spans) == 2


def test_the_cache_counts_the_bytes_of_pixels() -> None:
    model, image_cache = model_of("qwen"), ImageCache()
    with closing(image_cache.lease()) as lease:
        prompt = model.prepare(TURN, lease=lease)
        assert image_cache.used_bytes == sum(image.pixels.nbytes for image in prompt.images) > 0
    assert image_cache.used_bytes == 0 < image_cache.held_bytes


@pytest.mark.parametrize("known", [False, True])
def test_images_of_a_prompt_that_was_too_long_do_not_count_for_a_shorter_one(known: bool) -> None:
    """Otherwise the result would depend on what is cached."""
    model = model_of("qwen")
    first, second = (image.pixels.nbytes for image in model.prepare(TURN).images)
    image_cache = ImageCache(budget_bytes=first + second)
    if known:
        asked(model, image_cache, TURN)
    with closing(image_cache.lease()) as lease:
        with pytest.raises(PromptTooLongError):
            model.prepare(TURN, lease=lease, at_most=model.prepare(TURN[:1]).spans[0].length)
        model.prepare(TURN[2:], lease=lease)
        assert image_cache.used_bytes == second
        lease.reserve(first)
    assert image_cache.used_bytes == 0


def test_nothing_is_decoded_without_memory_for_all_images(decoded: list[bytes]) -> None:
    model = model_of("qwen")
    images = model.prepare(TURN).images
    each = [image.pixels.nbytes for image in images]
    decoded.clear()
    with pytest.raises(RequestError, match=rf"take {sum(each):,} bytes"):
        asked(model, ImageCache(budget_bytes=sum(each) - 1), TURN)
    busy = ImageCache(budget_bytes=sum(each))
    with closing(busy.lease(1)), pytest.raises(OverloadedError):
        asked(model, busy, TURN)
    assert decoded == [] and busy.held_bytes == 0
    asked(model, busy, TURN)
    assert decoded == [ONE.data, TWO.data]


def test_a_damaged_image_releases_its_memory_and_is_not_cached(decoded: list[bytes]) -> None:
    model, image_cache = model_of("gemma3"), ImageCache()
    damaged = ImagePart(TWO.data[:60] + bytes(20) + TWO.data[80:])
    for _ in range(2):
        with pytest.raises(RequestError, match=r"damaged|truncated"):
            asked(model, image_cache, user(ONE, damaged))
        assert image_cache.used_bytes == 0
    assert decoded == [ONE.data, damaged.data, damaged.data]


@pytest.mark.parametrize("family", REAL)
@pytest.mark.parametrize("size", [(600, 4000), (1500, 1500)], ids=str)
def test_an_image_beyond_the_context_is_refused_by_its_header(
    family: str, size: tuple[int, int], decoded: list[bytes]
) -> None:
    """The most tokens of an image are known without decoding it."""
    model, image_cache = model_of(family), ImageCache(budget_bytes=2**30)
    vision = dataclasses.replace(model.vision, processor=REAL[family])
    model = dataclasses.replace(model, vision=vision)
    outline = vision.processor.outline(*size)
    assert outline.rows <= vision.processor.most_rows
    large = ImagePart(blank(*size))
    places = sum(span.length for span in asked(model, image_cache, user(large)).spans)
    assert places == outline.rows and decoded == [large.data]
    fresh = ImageCache(budget_bytes=2**30)
    with pytest.raises(PromptTooLongError, match="1 of 2 images take"):
        asked(model, fresh, user(large, ONE), at_most=places - 1)
    other = ImagePart(blank(*size, shade=9))
    with pytest.raises(PromptTooLongError, match="2 of 2 images take"):
        asked(model, fresh, user(large, other), at_most=2 * places - 1)
    assert decoded == [large.data] and fresh.held_bytes == 0


def blank(height: int, width: int, shade: int = 0) -> bytes:
    file = BytesIO()
    Image.fromarray(np.full((height, width), shade, np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_from_the_header_is_that_of_the_upright_image(orientation: int) -> None:
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(photo(60, 200)).save(file, "JPEG", exif=exif)
    prompt = model_of("internvl").prepare(user(ImagePart(file.getvalue())))
    rows, columns = prompt.images[0].grid
    assert (rows > columns) == (orientation >= 5)


def test_a_cached_image_passes_every_check_again() -> None:
    model, image_cache = model_of("idefics3"), ImageCache()
    small = ImagePart(png(30, 40))
    places = sum(span.length for span in asked(model, image_cache, user(small)).spans)
    with pytest.raises(PromptTooLongError):
        asked(model, image_cache, user(small), at_most=places - 1)
    assert image_cache.used_bytes == 0
