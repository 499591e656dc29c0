"""Writes tool calls of earlier turns as text, for templates that render tools but no calls.

They have the model's own notation, so that the next call follows the same form.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from model_zoo.chat.formats.generic import named_call, tagged_call, with_images
from model_zoo.chat.formats.scanner import encoded
from model_zoo.chat.messages import Message, ToolCall

Write = Callable[[Sequence[ToolCall]], str]


def with_written_calls(messages: Sequence[Message], format_name: str) -> list[Message]:
    """The conversation with calls appended to the texts of their turns. `format_name`: the name of
    the model's `ReplyFormat`."""
    write = _WRITERS.get(format_name, _tags)
    return [_written(message, write) if message.tool_calls else message for message in messages]


def _written(message: Message, write: Write) -> Message:
    text = message.text + write(message.tool_calls)
    return dataclasses.replace(message, content=with_images(text, message.images), tool_calls=())


def _list(calls: Sequence[ToolCall]) -> str:
    """Granite 3."""
    return "<|tool_call|>" + encoded([named_call(call) for call in calls])


def _closed_list(calls: Sequence[ToolCall]) -> str:
    """Phi 4 mini."""
    return f"{_list(calls)}<|/tool_call|>"


def _python(calls: Sequence[ToolCall]) -> str:
    """LFM2."""
    return f"<|tool_call_start|>[{', '.join(map(_python_call, calls))}]<|tool_call_end|>"


def _python_call(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def _toolcalls(calls: Sequence[ToolCall]) -> str:
    """Nemotron 4."""
    written = (f"<toolcall> {encoded(named_call(call))} </toolcall>" for call in calls)
    return f"\n{' '.join(written)}"


def _tags(calls: Sequence[ToolCall]) -> str:
    """Hermes."""
    return "".join(f"\n{tagged_call(call)}" for call in calls)


_WRITERS: Mapping[str, Write] = {
    "list": _list,
    "phi-4-mini": _closed_list,
    "lfm2": _python,
    "nemotron-4": _toolcalls,
}
