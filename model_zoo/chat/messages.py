"""Conversations before a chat template renders them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Templates build control tokens from the role, so it must be one of these.
ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a message: the bytes of its file. `place`: the field of the client's request that
    it is from, for errors; None if unknown."""

    data: bytes = field(default=b"", repr=False)
    place: str | None = field(default=None, compare=False)


Content = str | tuple[str | ImagePart, ...]


class ReplyStart(Enum):
    """What the prompt of a conversation ends with."""

    NEW = "new"  # the beginning of a new turn of the assistant
    CONTINUED = "continued"  # the last message, which is the beginning of the reply
    NONE = "none"  # the end of the last message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the assistant; `arguments` are JSON values by name."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ImageTexts:
    """How the prompts of a family of models write images.

    `marker`: the text that its chat templates write for an image. `spelled`: the marker with the
    text that templates write around it, for templates without support for images; these get the
    parts of a message joined by `separator`. `reserved`: texts with a special meaning, which
    ordinary text must not contain. `writable`: texts of control tokens that belong to the text of
    requests and replies, such as those around places in an image.
    """

    marker: str
    spelled: str
    reserved: tuple[str, ...]
    separator: str = ""
    writable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `content`: a text, or texts and images in order. `thinking` and `tool_calls` belong to the
    assistant's turns; `tool_name` and `tool_call_id` identify the call that a tool's turn answers.
    `name` distinguishes participants with the same role.
    """

    role: str
    content: Content = ""
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """All texts of the content, joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, ImagePart))
