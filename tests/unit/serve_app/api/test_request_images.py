"""Images of requests at the ingress: what is sent to the replica, and what is refused."""

import base64
import dataclasses
import json
import re
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest

from model_zoo.chat.messages import ImagePart, Message
from runtime.engine.request import SamplingParams
from serve_app.api import request_images as images
from serve_app.api.request_images import ImageRules
from serve_app.config.settings import ImageUrlSettings, read_settings
from serve_app.messages.tasks import ChatTask, Conversation, RawText
from serve_app.transport import wire
from tests.unit.serve_app.api.picture_server import HOLD, picture_server, reply
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica, http_client
from tests.vision_prompts import png

LONGEST_S = 300.0  # that may be configured
SEEING = dataclasses.replace(CARD, capabilities=("completion", "vision"))
ONE, TWO = png(4, 6), png(6, 4, seed=1)
TASK = ChatTask("t1", "demo", RawText(""), SamplingParams())
SETTINGS = read_settings({"models": [{"name": "demo", "source": "m.gguf"}]})
CHAT, GENERATE, OPENAI = "/api/chat", "/api/generate", "/v1/chat/completions"


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_uri(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + coded(data)


def part(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


async def post(path: str, body: dict[str, Any], *, card=SEEING, rules: ImageRules | None = None):
    """The answer, and the prompts that replicas received."""
    replica = PretendReplica()
    given = {"model": "demo", "stream": False, **body}
    options = {"card": card, "image_rules": rules, "max_body_bytes": 2**23}
    async with http_client(replica, **options) as client:
        response = await client.post(path, json=given)
    return response, [task.prompt for task in replica.tasks]


async def prompt_of(path: str, body: dict[str, Any], **options: Any) -> Any:
    response, prompts = await post(path, body, **options)
    assert response.status_code == 200, response.text
    (prompt,) = prompts
    return prompt


def reported(path: str, response) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if path != OPENAI:
        return error
    assert error["type"] == "invalid_request_error"
    return error["message"]


async def refusal_of(path: str, body: dict[str, Any], **options: Any) -> str:
    response, prompts = await post(path, body, **options)
    assert prompts == [], "the replica was asked"
    return reported(path, response)


# In Ollama's protocol.
conversation = partial(Conversation, default_template="{{ .Prompt }}")
NATIVE = [
    ("What?", [ONE], (ImagePart(ONE), "What?")),
    ("What?", [ONE, TWO], (ImagePart(ONE), ImagePart(TWO), "What?")),
    ("This [img] here", [ONE], ("This ", ImagePart(ONE), " here")),
    ("This [img] here", [ONE, TWO], (ImagePart(TWO), "This ", ImagePart(ONE), " here")),
    ("No [img]", [], "No [img]"),
    ("", [ONE], (ImagePart(ONE),)),
]


@pytest.mark.parametrize(("words", "data", "content"), NATIVE)
async def test_ollamas_images_precede_the_text_or_replace_their_tags(words, data, content) -> None:
    body = user(words, images=[coded(image) for image in data])
    prompt = await prompt_of(CHAT, body)
    assert prompt == conversation((Message("user", content),))


async def test_each_message_keeps_its_own_images() -> None:
    first = {"role": "user", "content": "One?", "images": [coded(ONE)]}
    second = {"role": "user", "content": "Two?", "images": [coded(TWO)]}
    turn = {"role": "assistant", "content": "Yes."}
    prompt = await prompt_of(CHAT, {"messages": [first, turn, second]})
    contents = [message.content for message in prompt.messages]
    assert contents == [(ImagePart(ONE), "One?"), "Yes.", (ImagePart(TWO), "Two?")]


async def test_generate_takes_images_beside_its_prompt() -> None:
    body = {"prompt": "What?", "system": "Be brief.", "images": [coded(ONE)]}
    prompt = await prompt_of(GENERATE, body)
    seen = Message("user", (ImagePart(ONE), "What?"))
    assert prompt == conversation((Message("system", "Be brief."), seen))


async def test_a_raw_prompt_keeps_its_tags_and_its_images() -> None:
    body = {"prompt": "A [img-1] b", "raw": True, "images": [coded(ONE), coded(TWO)]}
    prompt = await prompt_of(GENERATE, body)
    assert prompt == RawText("A [img-1] b", (ImagePart(ONE), ImagePart(TWO)))


async def test_openais_parts_keep_their_order() -> None:
    parts = [text("a"), text("b"), part(data_uri(ONE)), text("c"), part(data_uri(TWO))]
    prompt = await prompt_of(OPENAI, user(parts))
    content = ("a\n\nb", ImagePart(ONE), "c", ImagePart(TWO))
    assert prompt == Conversation((Message("user", content),))


async def test_parts_that_are_all_text_become_one_text() -> None:
    prompt = await prompt_of(OPENAI, user([text("a"), text("b")]), card=CARD)
    assert prompt.messages == (Message("user", "a\n\nb"),)


@pytest.mark.parametrize(
    "given",
    [
        part(data_uri(ONE), detail="high"),
        part(data_uri(ONE, "data:image/jpeg;base64,")),
        part(data_uri(ONE, "data:;base64,")),
        part(data_uri(ONE, "DATA:image/webp;charset=utf-8;BASE64,")),
        {"type": "image_url", "image_url": data_uri(ONE)},
    ],
)
async def test_the_type_of_a_data_uri_is_detected_from_its_content(given) -> None:
    prompt = await prompt_of(OPENAI, user([given]))
    assert prompt.messages[0].content == (ImagePart(ONE),)


async def test_base64_in_lines_is_accepted() -> None:
    lines = base64.encodebytes(ONE * 3).decode()
    assert "\n" in lines
    prompt = await prompt_of(CHAT, user("", images=[lines]))
    assert prompt.messages[0].content == (ImagePart(ONE * 3),)


async def test_base64_may_use_the_alphabet_of_urls() -> None:
    image = ONE + bytes(-len(ONE) % 3) + b"\xfb\xef\xff\xfe"
    written = base64.urlsafe_b64encode(image).decode()
    assert {"-", "_", "="} <= set(written)
    for path, body in (
        (CHAT, user("", images=[written])),
        (OPENAI, user([part(f"data:image/png;base64,{written}")])),
    ):
        prompt = await prompt_of(path, body)
        assert prompt.messages[0].content == (ImagePart(image),)


@pytest.mark.parametrize("spelled", [str.upper, str.lower])
async def test_base64_may_have_percent_escapes(spelled) -> None:
    image = ONE + b"\xfb\xef\xff\xfe"
    image += bytes((1 - len(image)) % 3)  # so that it ends in "=="
    codes = set[str]()

    def noted(code: re.Match[str]) -> str:
        codes.add(code[0])
        return spelled(code[0])

    written = re.sub("%..", noted, quote(coded(image), safe=""))
    prompt = await prompt_of(OPENAI, user([part(f"data:image/png;base64,{written}")]))
    assert prompt.messages[0].content == (ImagePart(image),) and codes == {"%2B", "%2F", "%3D"}


BESIDE_TEXT = {"type": "image", "source": {"type": "base64", "data": coded(TWO)}}
PLACES = [
    (CHAT, user("x", images=[coded(ONE), coded(TWO)]), "messages[0].images[1]"),
    (GENERATE, {"prompt": "x", "images": [coded(ONE), coded(TWO)]}, "images[1]"),
    (OPENAI, user([text("a"), part(data_uri(TWO))]), "messages[0].content[1].image_url"),
    (
        "/v1/messages",
        {"max_tokens": 4, **user([text("a"), BESIDE_TEXT])},
        "messages[0].content[1].source.data",
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "input_image", "image_url": data_uri(TWO)}]},
            ]
        },
        "input[1].content[0].image_url",
    ),
]


@pytest.mark.parametrize(("path", "body", "place"), PLACES, ids=lambda each: str(each)[:20])
async def test_the_replica_gets_the_place_of_each_image_for_its_errors(path, body, place) -> None:
    prompt = await prompt_of(path, body)
    last = [image for message in prompt.messages for image in message.images][-1]
    assert (last.data, last.place) == (TWO, place)


def test_base64_decoded_in_pieces_equals_that_decoded_at_once(monkeypatch) -> None:
    monkeypatch.setattr(images, "PIECE_CHARACTERS", 8)
    for data in (ONE, ONE + b"a", ONE + b"ab"):
        assert images._from_base64(coded(data)) == data
    for text in ("aGk=" + coded(ONE), "AAAAaGk=" + coded(ONE), "AAAAAGk", "AAAA" * 3 + "A"):
        with pytest.raises(ValueError, match=r"padding|multiple|data characters"):
            images._from_base64(text)


BAD_DATA = {
    "not base64": ("%%%%", "is not base64 data"),
    "letters of another alphabet": ("./.$", "is not base64 data"),
    "a missing end": (coded(ONE)[:-1], "is not base64 data"),
    "an end in the middle": ("aGk=" + coded(ONE), "is not base64 data"),
    "no ASCII": ("ünicode", "is not base64 data"),
    "spaces": (" " + coded(ONE), "is not base64 data"),
    "a text": (coded(b"Hello there"), "is not a PNG, JPEG, WebP, GIF or BMP image"),
    "a drawing": (coded(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "is not a PNG"),
    "nothing": ("", "is not a PNG"),
    "RIFF, but no image": (coded(b"RIFF\0\0\0\0WAVE"), "is not a PNG"),
}


@pytest.mark.parametrize("name", BAD_DATA)
async def test_invalid_images_are_refused_by_their_field(name) -> None:
    data, reason = BAD_DATA[name]
    message = await refusal_of(CHAT, user("x", images=[coded(ONE), data]))
    assert '"messages[0].images[1]"' in message and reason in message
    message = await refusal_of(GENERATE, {"prompt": "x", "images": [data]})
    assert '"images[0]"' in message and reason in message
    url = f"data:image/png;base64,{data}"
    message = await refusal_of(OPENAI, user([text("x"), part(url)]))
    assert '"messages[0].content[1].image_url"' in message and reason in message


BAD_PARTS = [
    (part("data:text/html;base64,aGk="), "invalid image input"),
    (part("data:image/png,aGk="), "invalid image input"),
    (part("data:image/png;base64"), "invalid image input"),
    (part(coded(ONE)), "invalid image input"),
    (part("file:///etc/passwd"), "invalid image input"),
    (part("ftp://a.test/x.png"), "invalid image input"),
    ({"type": "image_url"}, "invalid image input"),
    ({"type": "image_url", "image_url": {"uri": "x"}}, "invalid image input"),
    ({"type": "input_audio", "input_audio": {"data": ""}}, '"input_audio", which is not served'),
    ({"type": "file", "file": {"file_id": "x"}}, '"file", which is not served'),
]


@pytest.mark.parametrize(("given", "reason"), BAD_PARTS, ids=[json.dumps(p) for p, _ in BAD_PARTS])
async def test_other_parts_are_refused_by_name(given, reason) -> None:
    message = await refusal_of(OPENAI, user([given]))
    assert reason in message and "messages[0].content[0]" in message


def bodies(image: bytes, count: int = 1) -> list[tuple[str, dict[str, Any]]]:
    native = [coded(image)] * count
    return [
        (CHAT, user("x", images=native)),
        (GENERATE, {"prompt": "x", "images": native}),
        (GENERATE, {"prompt": "x", "images": native, "raw": True}),
        (OPENAI, user([part(data_uri(image))] * count)),
    ]


@pytest.mark.parametrize(("path", "body"), bodies(ONE))
async def test_an_image_for_a_model_without_vision_is_refused(path, body) -> None:
    message = await refusal_of(path, body, card=CARD)
    lacking = "'demo' does not support images: this model is missing data required for image input"
    assert lacking in message


@pytest.mark.parametrize(("path", "body"), bodies(ONE, count=3))
async def test_too_many_images_are_refused(path, body) -> None:
    message = await refusal_of(path, body, rules=ImageRules(most=2))
    assert "3 images; at most 2" in message


async def test_images_of_all_messages_count_together() -> None:
    messages = user("x", images=[coded(ONE)])["messages"] * 3
    message = await refusal_of(CHAT, {"messages": messages}, rules=ImageRules(most=2))
    assert "3 images; at most 2" in message


@pytest.mark.parametrize(("path", "body"), bodies(ONE))
async def test_a_large_image_is_refused(path, body) -> None:
    message = await refusal_of(path, body, rules=ImageRules(most_bytes=len(ONE) - 1))
    assert f"an image of {len(ONE):,} bytes; at most {len(ONE) - 1:,}" in message
    response, _ = await post(path, body, rules=ImageRules(most_bytes=len(ONE)))
    assert response.status_code == 200


@pytest.mark.parametrize(("path", "body"), bodies(ONE, count=2))
async def test_all_images_together_have_a_limit(path, body, monkeypatch) -> None:
    monkeypatch.setattr(images, "MAX_REQUEST_BYTES", 2 * len(ONE) - 1)
    assert f"{2 * len(ONE):,} bytes together" in await refusal_of(path, body)


async def test_an_image_counts_each_time_a_text_names_it(monkeypatch) -> None:
    monkeypatch.setattr(images, "MAX_REQUEST_BYTES", 100 * len(ONE))
    body = user("[img-0]" * 101, images=[coded(ONE)])
    assert "bytes together" in await refusal_of(CHAT, body, rules=ImageRules(most=101))


PAIR = [coded(ONE), coded(TWO)]
NAMING = "[img-1] or [img-1], [img-1]"  # the second of a pair, thrice


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, user(NAMING, images=PAIR)),
        (GENERATE, {"prompt": NAMING, "images": PAIR}),
        (GENERATE, {"prompt": NAMING, "images": PAIR, "raw": True}),
    ],
)
async def test_each_tag_of_an_image_counts_as_an_image(path, body) -> None:
    assert "4 images; at most 3" in await refusal_of(path, body, rules=ImageRules(most=3))
    await prompt_of(path, body, rules=ImageRules(most=4))


def test_accepted_requests_fit_a_message_of_the_transport() -> None:
    longest_body = next(
        limit.le
        for limit in type(SETTINGS).model_fields["max_body_bytes"].metadata
        if hasattr(limit, "le")
    )
    assert longest_body + images.MAX_REQUEST_BYTES < wire.MAX_TASK_BYTES


async def test_errors_outside_the_images_are_reported_first() -> None:
    async with picture_server({}) as server:
        body = {**user([part(server.url())]), "temperature": 9}
        assert '"temperature"' in await refusal_of(OPENAI, body, rules=fetching(server))
    assert server.asked == []


# By URL


def fetching(server, **change: Any) -> ImageRules:
    given = {"allowed_hosts": (server.place,), "allow_private": True, **change}
    return ImageRules(urls=ImageUrlSettings(**given))


async def test_urls_are_off_unless_configured() -> None:
    async with picture_server({"/": reply(ONE)}) as server:
        message = await refusal_of(OPENAI, user([part(server.url())]))
    assert "image URLs are not currently supported, please use base64 encoded data" in message
    assert server.asked == []


async def test_an_image_that_occurs_several_times_is_fetched_once() -> None:
    async with picture_server({"/1": reply(ONE), "/2": reply(TWO)}) as server:
        parts = [part(server.url(path)) for path in ("/1", "/2", "/1")]
        parts.insert(1, part(data_uri(TWO)))
        prompt = await prompt_of(OPENAI, user(parts), rules=fetching(server))
    assert prompt.messages[0].content == tuple(map(ImagePart, (ONE, TWO, TWO, ONE)))
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("answer", "change", "reason"),
    [
        (reply(b"<html>"), {}, "is not a PNG, JPEG, WebP, GIF or BMP image"),
        (reply(ONE), {"max_bytes": 9}, "larger than 9 bytes"),
        ([HOLD], {"timeout_s": 0.2}, "did not arrive within 0.2 seconds"),
        (reply(ONE), {"allow_private": False}, "no public address"),
        (reply(ONE), {"allowed_hosts": ("a.test",)}, "not among those"),
    ],
)
async def test_an_image_that_cannot_be_fetched_is_refused_by_its_field(
    answer, change, reason
) -> None:
    async with picture_server({"/": answer}) as server:
        body = user([part(server.url())])
        message = await refusal_of(OPENAI, body, rules=fetching(server, **change))
    assert reason in message and '"messages[0].content[0].image_url"' in message


async def test_one_invalid_image_cancels_the_other_fetches() -> None:
    async with picture_server({"/slow": [HOLD], "/bad": reply(b"<html>")}) as server:
        body = user([part(server.url("/slow")), part(server.url("/bad"))])
        message = await refusal_of(OPENAI, body, rules=fetching(server, timeout_s=LONGEST_S))
    assert '"messages[0].content[1].image_url" is not a PNG' in message


@pytest.mark.parametrize("inline", [0, 1])
async def test_fetching_ends_when_all_images_together_reach_their_limit(
    inline: int, monkeypatch
) -> None:
    monkeypatch.setattr(images, "MAX_REQUEST_BYTES", (3 + inline) * len(ONE) - 1)
    endless = [reply(ONE + ONE)[: -len(ONE)], HOLD]
    async with picture_server({"/1": endless, "/2": endless}) as server:
        parts = [part(server.url(path)) for path in ("/1", "/2", "/1")]
        parts += [part(data_uri(ONE))] * inline
        rules = fetching(server, timeout_s=LONGEST_S)
        message = await refusal_of(OPENAI, user(parts), rules=rules)
    assert f"{(3 + inline) * len(ONE):,} bytes together" in message


async def test_nothing_is_fetched_for_a_refused_request() -> None:
    async with picture_server({"/": reply(ONE)}) as server:
        rules = fetching(server)
        for parts, card in (
            ([part(server.url()), part("data:image/png;base64,%%%%")], SEEING),
            ([part(server.url()), part("http://elsewhere.test/")], SEEING),
            ([part(server.url())] * 17, SEEING),
            ([part(server.url())], CARD),
        ):
            await refusal_of(OPENAI, user(parts), rules=rules, card=card)
    assert server.asked == []


async def test_ollamas_images_are_never_fetched() -> None:
    async with picture_server({"/": reply(ONE)}) as server:
        body = user("x", images=[server.url()])
        assert "is not base64 data" in await refusal_of(CHAT, body, rules=fetching(server))
    assert server.asked == []


# The direct stream


def test_images_are_sent_over_the_transport_as_bytes() -> None:
    data = bytes(range(256)) * 100
    message = Message("user", ("a", ImagePart(data), "b"))
    for prompt in (Conversation((message,)), RawText("x", (ImagePart(data),))):
        task = dataclasses.replace(TASK, prompt=prompt)
        framed = wire.frame(wire.request_of(task))
        assert framed.count(data) == 1 and len(framed) < len(data) + 2000
        assert wire.decode(framed[4:]) == wire.GenerateRequest(task)


async def test_an_image_of_megabytes_is_sent_complete() -> None:
    large = ONE + bytes(5 * 2**20)
    prompt = await prompt_of(CHAT, user("x", images=[coded(large)]))
    assert prompt.messages[0].content == (ImagePart(large), "x")


def test_the_defaults_of_settings_are_those_of_the_rules() -> None:
    assert ImageRules.of(SETTINGS) == ImageRules()
