"""A tiny vision model in a real replica: its answers, and images that it refuses."""

import json
import struct
import zlib
from collections.abc import Iterator

import pytest

from model_zoo.chat.messages import ImagePart, Message
from runtime.engine.engine_statistics import EngineStatistics
from runtime.engine.request import SamplingParams
from runtime.errors import ConfigurationError, PromptTooLongError, RequestError
from serve_app.messages.tasks import ChatDelta, ChatTask, Conversation, RawText
from serve_app.replica.loading import load_replica
from serve_app.replica.model_check import check_model
from serve_app.replica.replica import ModelReplica
from tests.patience import until
from tests.tiny_models import write_tiny_llama
from tests.tiny_vision_model import PLACES, ROWS, write_tiny_vision_model
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.loaded_replicas import loaded, settings
from tests.vision_prompts import png

CONTEXT = 64
GREEDY = SamplingParams(temperature=0, logprobs=0)


@pytest.fixture(scope="module", params=["ollama", "llama.cpp"])
def files(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return path, write_tiny_vision_model(path, flavour=request.param)


@pytest.fixture(scope="module")
def replica(files) -> Iterator[ModelReplica]:
    with loaded(*files, max_image_pixels=10_000) as replica:
        yield replica


async def answer(replica: ModelReplica, *content: str | bytes, **change) -> ChatDelta:
    parts = tuple(part if isinstance(part, str) else ImagePart(part) for part in content)
    prompt = Conversation((Message("user", parts),))
    task = ChatTask(
        "1", "demo", **{"prompt": prompt, "sampling": GREEDY, "max_tokens": 4, **change}
    )
    return await answer_of(replica, task)


async def at_rest(replica: ModelReplica) -> EngineStatistics:
    """Its statistics, once the last answer's steps have retired."""
    await until(lambda: not (replica.statistics().running or replica.statistics().pages_owned))
    return replica.statistics()


def likelihoods(delta: ChatDelta) -> list[float]:
    return [entry.drawn.logprob for entry in delta.logprobs]


async def test_the_answer_depends_on_the_image_and_its_position(replica) -> None:
    one, two = png(30, 40), png(40, 30, seed=1)
    answers = [
        likelihoods(await answer(replica, *content))
        for content in ((one, "a b"), (two, "a b"), ("a ", one, "b"), (one, two, "a b"), ("a b",))
    ]
    assert len({tuple(numbers) for numbers in answers}) == len(answers)
    assert likelihoods(await answer(replica, one, "a b")) == answers[0]


async def test_placeholders_of_images_count_as_prompt_tokens(replica) -> None:
    text_only = (await answer(replica, "hello")).usage
    for count in (1, 2):
        usage = (await answer(replica, *[png(30, 40)] * count, "hello")).usage
        assert usage.prompt_tokens == text_only.prompt_tokens + count * PLACES


async def test_a_cached_image_is_not_encoded_again(replica) -> None:
    image = png(33, 44, seed=9)
    before = replica.statistics().images_encoded_total
    for _ in range(3):
        await answer(replica, image, image, "hello")
    assert replica.statistics().images_encoded_total == before + 1


async def test_a_raw_prompt_has_images_at_its_tags(replica) -> None:
    image = ImagePart(png(30, 40))
    tagged = await answer(replica, prompt=RawText("a [img-0] b", (image,)))
    text_only = await answer(replica, prompt=RawText("a  b"))
    assert tagged.usage.prompt_tokens > text_only.usage.prompt_tokens + ROWS
    with pytest.raises(RequestError, match="invalid image index: 1"):
        await answer(replica, prompt=RawText("a [img-1]", (image,)))


def header_bomb() -> bytes:
    """A PNG of a few bytes whose header states 10^10 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return png(4, 4)[:8] + chunk + png(4, 4)[33:]


BAD = {
    "decompression bomb": (header_bomb(), "100,000 x 100,000 pixels; at most 10,000"),
    "too many pixels": (png(101, 100), "100 x 101 pixels; at most 10,000"),
    "truncated": (png(30, 40)[:-200], "truncated"),
    "header only": (png(30, 40)[:20], "truncated"),
    "damaged": (png(4, 4)[:41] + bytes(20) + png(4, 4)[61:], "damaged"),
    "not an image": (b"hello", "no PNG, JPEG, WebP, GIF or BMP"),
    "empty": (b"", "no PNG, JPEG, WebP, GIF or BMP"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_image_is_refused_and_the_replica_keeps_serving(replica, name) -> None:
    data, reason = BAD[name]
    before = await at_rest(replica)
    with pytest.raises(RequestError, match=reason):
        await answer(replica, png(30, 40), data, "hello")
    assert replica.statistics() == before
    assert (await answer(replica, png(30, 40), "hello")).usage is not None


@pytest.mark.parametrize("name", BAD)
async def test_the_error_about_an_image_names_its_field(replica, name) -> None:
    data, reason = BAD[name]
    places = ("messages[0].images[0]", "messages[2].images[0]", "messages[2].images[1]")
    images = map(ImagePart, (png(30, 40), data, data), places)
    with pytest.raises(RequestError, match=reason) as refused:
        await answer(replica, prompt=Conversation((Message("user", (*images, "hello")),)))
    assert str(refused.value).startswith(f'field "{places[1]}": ')


async def test_more_images_than_the_context_holds_are_refused(replica) -> None:
    before = await at_rest(replica)
    with pytest.raises(PromptTooLongError, match=r"images.*64|64.*prompt"):
        await answer(replica, *[png(30, 40)] * 5, "hello")
    with pytest.raises(PromptTooLongError):
        await answer(replica, png(30, 40), "hello", context_tokens=ROWS)
    assert replica.statistics() == before


def test_the_card_lists_vision(replica) -> None:
    assert replica.describe().capabilities == ("completion", "vision")


def test_the_memory_of_the_vision_model_is_logged(files, capsys) -> None:
    load_replica(settings(*files)).close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (model,) = [line for line in lines if line["event"] == "model"]
    (vision,) = [line for line in lines if line["event"] == "vision"]
    assert model["vision_bytes"] > 0 and 0 < vision["weight_bytes"] < model["weight_bytes"]
    assert vision["max_image_rows"] == ROWS
    assert not [line for line in lines if line["event"] == "largest images do not fit"]


def test_a_context_too_small_for_an_image_is_logged(files, capsys) -> None:
    load_replica(settings(*files, context_tokens=ROWS)).close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if line["event"] == "largest images do not fit"]


def test_image_cache_bytes_must_hold_one_image(files) -> None:
    least = ROWS * 64 * 4
    with loaded(*files, image_cache_bytes=2**20) as replica:
        plenty = replica.describe().reserved_bytes
    with loaded(*files, image_cache_bytes=least) as replica:
        assert plenty - replica.describe().reserved_bytes == 2**20 - least
    with pytest.raises(ConfigurationError, match=r"Model demo: `image_cache_bytes` is 9"):
        load_replica(settings(*files, image_cache_bytes=9))


def test_image_cache_bytes_is_refused_for_a_text_model(tmp_path) -> None:
    write_tiny_llama(tmp_path / "text.gguf")
    for tried in (check_model, load_replica):
        with pytest.raises(ConfigurationError, match=r"`image_cache_bytes`.*has no vision"):
            tried(settings(tmp_path / "text.gguf", image_cache_bytes=2**20))


def test_a_projector_for_a_text_model_is_refused(tmp_path) -> None:
    projector = write_tiny_vision_model(tmp_path / "tiny.gguf", flavour="llama.cpp")
    write_tiny_llama(tmp_path / "text.gguf")
    with pytest.raises(ConfigurationError, match=r"Model demo: .*projector"):
        check_model(settings(tmp_path / "text.gguf", projector))
