"""Conversations with too many images are reported like prompts that are too long."""

from typing import Any

import pytest

from serve_app.api import request_images as images
from serve_app.api.request_images import ImageRules
from tests.unit.serve_app.api.test_request_images import (
    CHAT,
    ONE,
    OPENAI,
    coded,
    data_uri,
    part,
    post,
    user,
)

ANTHROPIC_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": coded(ONE)},
}
TOO_MANY: list[Any] = [
    (CHAT, user("Hi", images=[coded(ONE)] * 3)),
    (OPENAI, user([part(data_uri(ONE))] * 3)),
    ("/v1/messages", {**user([ANTHROPIC_IMAGE] * 3), "max_tokens": 9}),
    ("/v1/responses", {"input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": data_uri(ONE)}] * 3}
    ]}),
]  # fmt: skip


@pytest.mark.parametrize("limit", ["number", "bytes"])
@pytest.mark.parametrize(("path", "body"), TOO_MANY)
async def test_too_many_images_are_reported_like_too_long_prompts(
    path, body, limit, monkeypatch
) -> None:
    """So that agents shorten the conversation instead of failing at every further request."""
    if limit == "bytes":
        monkeypatch.setattr(images, "MAX_REQUEST_BYTES", 2 * len(ONE))
    rules = ImageRules(most=2 if limit == "number" else 3)
    response, _ = await post(path, body, rules=rules)
    assert response.status_code == 400
    error = response.json()["error"]
    said = error if path == CHAT else error["message"]
    assert ("3 images" if limit == "number" else f"{3 * len(ONE):,} bytes together") in said
    assert said.startswith("prompt is too long: ") is (path != CHAT)
    if path in (OPENAI, "/v1/responses"):
        assert (error["type"], error["code"]) == (
            "invalid_request_error",
            "context_length_exceeded",
        )


async def test_a_stream_of_responses_with_too_many_images_begins_and_fails() -> None:
    """As with a prompt that is too long: Codex shortens nothing after an error response."""
    path, body = TOO_MANY[-1]
    response, _ = await post(path, {**body, "stream": True}, rules=ImageRules(most=2))
    assert response.status_code == 200
    assert "response.created" in response.text and "response.failed" in response.text
    assert "context_length_exceeded" in response.text and "3 images" in response.text
