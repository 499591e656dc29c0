"""Tags that mark the places of images in a text, as in Ollama's API.

`[img-2]` is the third image of the request's list, `[img]` the next one without a numbered tag.
Images without a tag come before the text.
"""

import re
from collections import Counter
from collections.abc import Sequence

from model_zoo.chat.messages import ImagePart
from runtime.errors import RequestError

_TAG = re.compile(r"\[img(?:-(\d{1,9}))?\]")
_NUMBERED = re.compile(r"\[img-(\d{1,9})\]")
Content = tuple[str | ImagePart, ...]


def image_places(text: str, count: int) -> int:
    """How many images a text shows of a list of `count`: each once, or as often as it is named."""
    if not count:
        return 0
    named = Counter(int(tag[1]) for tag in _NUMBERED.finditer(text))
    return sum(max(named[index], 1) for index in range(count))


def with_images(text: str, images: Sequence[ImagePart]) -> Content:
    """The content of a message; tags without an image remain text."""
    named = {int(tag[1]) for tag in _TAG.finditer(text) if tag[1]}
    unnamed = [index for index in range(len(images)) if index not in named]
    content: list[str | ImagePart] = []
    end = 0
    for tag in _TAG.finditer(text):
        if tag[1]:
            index = int(tag[1]) if int(tag[1]) < len(images) else None
        else:
            index = unnamed.pop(0) if unnamed else None
        if index is not None:
            content += (text[end : tag.start()], images[index])
            end = tag.end()
    first = (images[index] for index in unnamed)
    return tuple(part for part in (*first, *content, text[end:]) if part != "")


def tagged(text: str, images: Sequence[ImagePart]) -> Content:
    """The content of a raw prompt, with numbered tags only; RequestError for an unknown number."""
    numbers, texts = _NUMBERED.findall(text), _NUMBERED.split(text)[::2]
    if not images:
        return (text,)
    for number in map(int, numbers):
        if number >= len(images):
            raise RequestError(f"invalid image index: {number}")
    named = set(map(int, numbers))
    content: list[str | ImagePart] = [texts[0]]
    for number, piece in zip(map(int, numbers), texts[1:], strict=True):
        content += (images[number], piece)
    first = (image for index, image in enumerate(images) if index not in named)
    return tuple(part for part in (*first, *content) if part != "")
