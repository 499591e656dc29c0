"""Converts to text what a template does not show: tools, calls and results."""

from collections.abc import Mapping, Sequence
from typing import Any

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.generic import generic_messages, with_results_of_users
from model_zoo.chat.formats.written_calls import with_written_calls
from model_zoo.chat.messages import Message

Tools = Sequence[Mapping[str, Any]]


def readable(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, format_name: str
) -> tuple[Sequence[Message], Tools]:
    """The conversation and the tools for the template. `format_name`: the name of the model's
    `ReplyFormat`."""
    if not template.supports_tools:
        return generic_messages(messages, tools), ()
    if template.form.calls is None:
        messages = with_written_calls(messages, format_name)
    if template.form.results is None:
        messages = with_results_of_users(messages)
    return messages, tools
