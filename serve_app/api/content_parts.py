"""Typed parts of messages, common to Anthropic's protocol and OpenAI's."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from runtime.errors import RequestError
from serve_app.api.request_images import UnreadImage


def check_type(place: str, part: Any, known: tuple[str, ...]) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f'field "{place}" must be an object with a type')
    if part["type"] not in known:
        raise RequestError(
            f'field "{place}" is of type "{part["type"][:80]}", which is not served here; the '
            f"types are {', '.join(known)}"
        )


def string(place: str, part: dict[str, Any], field: str) -> str:
    value = part.get(field)
    if not isinstance(value, str):
        raise RequestError(f'field "{place}.{field}" must be a string')
    return value


def joined(
    parts: Iterable[str | UnreadImage], separator: str = ""
) -> str | tuple[str | UnreadImage, ...]:
    """The parts, with adjacent texts joined; one text if there are no images."""
    merged: list[str | UnreadImage] = []
    for kind, group in groupby(parts, key=type):
        if kind is str:
            merged.append(separator.join(map(str, group)))
        else:
            merged += group
    if any(isinstance(part, UnreadImage) for part in merged):
        return tuple(merged)
    return "".join(map(str, merged))
