"""Refuses prompts that lack tools or results: some templates show them at certain places only."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model_zoo.chat.messages import Message
from runtime.errors import RequestError

# Templates escape other characters in various ways.
_WORD = re.compile(r"[A-Za-z0-9]+")
_SEARCHED_CHARACTERS = 1000


def refuse_unshown(
    text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Raises RequestError if the rendered text does not contain the longest word of each tool's
    name and of each result."""
    names = [tool.get("function", tool).get("name", "") for tool in tools]
    if lost := _lost(text, names):
        raise RequestError(
            f"The model's chat template does not show the tool {lost[0]!r} in this conversation; "
            "end it with a message of the user, or send it without tools."
        )
    results = [message.text for message in messages if message.role == "tool"]
    if lost := _lost(text, results):
        raise RequestError(
            f"The model's chat template shows {len(results) - len(lost)} of the conversation's "
            f"{len(results)} results of tools; send each directly after its call, or as a message "
            "of the user."
        )


def _lost(text: str, expected: Iterable[str]) -> list[str]:
    """Those of the texts that `text` does not show; it is searched once if they are in order."""
    lost, at = [], 0
    for each in expected:
        word = max(_WORD.findall(each[:_SEARCHED_CHARACTERS]), key=len, default="")
        found = text.find(word, at)
        found = text.find(word) if found == -1 else found
        if found == -1:
            lost.append(each)
        else:
            at = found
    return lost
