"""The system prompt and messages that a model puts before conversations."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from model_zoo.chat.messages import Message
from serve_app.messages.tasks import Conversation, PromptSource


@dataclass(frozen=True, slots=True)
class PromptDefaults:
    """A model's own system prompt and messages. A system message of the request replaces the system
    prompt.

    If `messages` begin with a system message, as saved sessions do, it is appended to `system`.
    """

    system: str | None = None
    messages: tuple[Message, ...] = ()

    def apply(self, prompt: PromptSource) -> PromptSource:
        """The conversation with the defaults before it; other prompts unchanged.

        A conversation that continues the tokens of an earlier answer gets no messages, because
        these tokens already contain them.
        """
        if not isinstance(prompt, Conversation):
            return prompt
        system, rest = _split_system(prompt.messages)
        default_system, before = _split_system(() if prompt.after else self.messages)
        texts = dict.fromkeys(filter(None, (self.system, *(each.text for each in default_system))))
        if not system and texts:
            system = (Message("system", "\n\n".join(texts)),)
        return msgspec.structs.replace(prompt, messages=(*system, *before, *rest))


def _split_system(
    messages: Sequence[Message],
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The first message if it is a system message, and the others."""
    count = int(bool(messages) and messages[0].role == "system")
    return tuple(messages[:count]), tuple(messages[count:])
