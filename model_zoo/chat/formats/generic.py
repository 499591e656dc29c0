"""Tools for templates without tools: schemas, calls and results as plain text.

The form is that of Hermes, which most models were trained on: JSON within `<tool_call>`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from model_zoo.chat.formats.scanner import encoded
from model_zoo.chat.messages import Content, ImagePart, Message, ToolCall

_INSTRUCTIONS = (
    "You may call functions. Their signatures are:\n{signatures}\n\n"
    "To call a function, write a JSON object with its name and arguments within tags:\n"
    '<tool_call>\n{{"name": "FUNCTION", "arguments": {{...}}}}\n</tool_call>\n'
    "Write nothing else then. The results follow within <tool_response> tags."
)


def generic_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The conversation with calls and results as text, and with `tools` described in the system
    message. Calls and results are also converted if there are no tools."""
    plain = with_results_of_users([_plain(message) for message in messages])
    return _with_instructions(plain, tools) if tools else plain


def with_results_of_users(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the results of tools as turns of the user."""
    return _with_joined_results([_of_user(m) if m.role == "tool" else m for m in messages])


def _of_user(result: Message) -> Message:
    text = f"<tool_response>\n{result.text}\n</tool_response>"
    return Message("user", with_images(text, result.images))


def _plain(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = "\n".join(map(tagged_call, message.tool_calls))
    text = f"{message.text}\n{calls}" if message.text else calls
    return dataclasses.replace(message, content=with_images(text, message.images), tool_calls=())


def tagged_call(call: ToolCall) -> str:
    return f"<tool_call>\n{encoded(named_call(call))}\n</tool_call>"


def named_call(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def _with_joined_results(messages: list[Message]) -> list[Message]:
    """Joins the results of parallel calls in one message, because templates require users and
    assistants to alternate."""
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else None
        if before is not None and _is_result(before) and _is_result(message):
            content = f"{before.content}\n{message.content}"
            joined[-1] = dataclasses.replace(before, content=content)
        else:
            joined.append(message)
    return joined


def _is_result(message: Message) -> bool:
    content = message.content
    return isinstance(content, str) and content.startswith("<tool_response>\n")


def _with_instructions(
    messages: list[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    signatures = "\n".join(encoded(tool.get("function", tool)) for tool in tools)
    text = _INSTRUCTIONS.format(signatures=signatures)
    if messages and messages[0].role == "system":
        first = messages[0]
        content = with_images(f"{first.text}\n\n{text}", first.images)
        return [dataclasses.replace(first, content=content), *messages[1:]]
    return [Message("system", text), *messages]


def with_images(text: str, images: tuple[ImagePart, ...]) -> Content:
    """The content of a message with these images before the text."""
    return (*images, text) if images else text
