"""Parts of messages and of tool results in the items of OpenAI's /v1/responses."""

from typing import Any

from runtime.errors import RequestError
from serve_app.api.content_parts import check_type, joined, string
from serve_app.api.fields import check_count
from serve_app.api.request_images import UnreadImage, from_url

# A part's type -> the field with its text.
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
IMAGE = "input_image"

Item = dict[str, Any]


def read_parts(place: str, content: Any, known: tuple[str, ...]) -> list[Item]:
    """Parts of the `known` types in their normal form; a string is one part."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f'field "{place}" must be a string or a list of parts')
    check_count(place, content)
    parts = []
    for index, part in enumerate(content):
        check_type(f"{place}[{index}]", part, known)
        parts.append(_part(f"{place}[{index}]", part))
    return parts


def content_of(place: str, parts: list[Item]) -> str | tuple[str | UnreadImage, ...]:
    """The content of a message that consists of `parts`."""
    return joined(
        [
            from_url(f"{place}[{index}].image_url", part["image_url"])
            if part["type"] == IMAGE
            else part["text"]
            for index, part in enumerate(parts)
        ]
    )


def image_url(place: str, part: Item) -> str:
    """The URL of the image at `place`."""
    url = part.get("image_url")
    if not isinstance(url, str):
        raise RequestError(
            f'invalid image input: field "{place}.image_url" must be a URL, a string; files are '
            "not served"
        )
    return url


def _part(place: str, part: Item) -> Item:
    """A part. `detail` is ignored: the model determines the resolution."""
    if part["type"] == IMAGE:
        return {"type": IMAGE, "image_url": image_url(place, part), "detail": "auto"}
    text = string(place, part, TEXTS.get(part["type"], "text"))
    return {"type": "input_text", "text": text}
