"""Images through the official clients of both protocols, against a running application."""

import base64
from pathlib import Path

import httpx
import ollama
import openai
import pytest

from tests.patience import HANG_S
from tests.serve.vision.application import PICTURE
from tests.tiny_vision_model import PLACES
from tests.vision_prompts import png

MODEL = "shared"
ONE, TWO = PICTURE, png(40, 30, seed=1)


@pytest.fixture
def native(url: str) -> ollama.Client:
    return ollama.Client(host=url, timeout=HANG_S)


@pytest.fixture
def oai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=HANG_S, max_retries=0)


def data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def chat(native: ollama.Client, *images: bytes | Path):
    message = {"role": "user", "content": "hello", "images": list(images)}
    options = {"temperature": 0, "num_predict": 4}
    return native.chat(model=MODEL, messages=[message], options=options, logprobs=True)


def complete(oai: openai.OpenAI, *parts: bytes | str, **change):
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_uri(part), "detail": "auto"}}
        for part in parts
    ]
    given = {"temperature": 0, "max_tokens": 4, "logprobs": True, **change}
    messages = [{"role": "user", "content": content}]
    return oai.chat.completions.create(model=MODEL, messages=messages, **given)


def test_ollamas_client_sends_images_as_bytes_or_files(native, tmp_path) -> None:
    (tmp_path / "one.png").write_bytes(ONE)
    sent, read, other = chat(native, ONE), chat(native, tmp_path / "one.png"), chat(native, TWO)
    assert [e.logprob for e in sent.logprobs] == [e.logprob for e in read.logprobs]
    assert [e.logprob for e in sent.logprobs] != [e.logprob for e in other.logprobs]
    assert sent.prompt_eval_count == chat(native).prompt_eval_count + PLACES


def test_generate_with_images_returns_no_context(native) -> None:
    options = {"temperature": 0, "num_predict": 4}
    with_image = native.generate(MODEL, "hello", images=[ONE], options=options)
    without = native.generate(MODEL, "hello", options=options)
    assert with_image.prompt_eval_count == without.prompt_eval_count + PLACES
    assert without.context and not with_image.context
    raw = native.generate(MODEL, "a [img-0] b", images=[ONE], raw=True, options=options)
    assert raw.done_reason == "length"


def test_openais_client_sends_parts(oai) -> None:
    first, again = complete(oai, ONE, "hello"), complete(oai, ONE, "hello")
    behind = complete(oai, "hello", ONE)
    logprobs = [[e.logprob for e in r.choices[0].logprobs.content] for r in (first, again, behind)]
    assert logprobs[0] == logprobs[1] != logprobs[2]
    assert first.usage.prompt_tokens == complete(oai, "hello").usage.prompt_tokens + PLACES


def test_both_protocols_give_the_same_prompt(native, oai) -> None:
    theirs = [entry.logprob for entry in chat(native, ONE).logprobs]
    assert theirs == [e.logprob for e in complete(oai, ONE, "hello").choices[0].logprobs.content]


def test_a_vision_model_lists_the_vision_capability(native, url) -> None:
    assert "vision" in native.show(MODEL).capabilities
    description = httpx.post(f"{url}/api/show", json={"model": MODEL}).json()
    assert description["projector_info"]["general.architecture"] == "clip"
    tags = httpx.get(f"{url}/api/tags").json()["models"]
    assert all("vision" in model["capabilities"] for model in tags)


BAD = [
    ([ONE[:-200]], '": The PNG image is truncated'),
    ([ONE] * 9, "at most 8"),
]


@pytest.mark.parametrize(("images", "reason"), BAD)
def test_bad_images_are_refused_in_both_protocols_and_the_model_still_answers(
    native, oai, images, reason
) -> None:
    with pytest.raises(ollama.ResponseError) as native_error:
        chat(native, *images)
    with pytest.raises(openai.BadRequestError) as error:
        complete(oai, *images, "hello")
    assert native_error.value.status_code == 400
    assert reason in native_error.value.error and reason in error.value.message
    assert chat(native).done and chat(native, ONE).done


def from_url(oai: openai.OpenAI, url: str):
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hello"}]
    return oai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
    )


def test_an_image_by_its_url_is_the_same_as_its_bytes(oai, pictures) -> None:
    sent, fetched = complete(oai, ONE, "hello"), from_url(oai, f"{pictures.url}/one.png")
    logprobs = [[e.logprob for e in r.choices[0].logprobs.content] for r in (sent, fetched)]
    assert logprobs[0] == logprobs[1]
