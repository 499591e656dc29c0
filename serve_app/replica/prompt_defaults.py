"""What conversations with a model begin with, unless they bring their own."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from model_zoo.chat.messages import Message
from serve_app.gateway.tasks import Conversation, PromptSource

_INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True, slots=True)
class PromptDefaults:
    """A model's own system text and messages; a conversation's system message replaces the text.

    Messages that begin with a system message, as saved sessions do, add it to the text.
    """

    system: str | None = None
    messages: tuple[Message, ...] = ()

    def before(self, prompt: PromptSource) -> PromptSource:
        """A conversation with its opening; other prompts stay as they are.

        One that goes on after tokens of an earlier answer has the messages among them.
        """
        if not isinstance(prompt, Conversation):
            return prompt
        own, rest = _instructed(prompt.messages)
        first, said = _instructed(() if prompt.after else self.messages)
        texts = dict.fromkeys(filter(None, (self.system, *(each.text for each in first))))
        if not own and texts:
            own = (Message("system", "\n\n".join(texts)),)
        return msgspec.structs.replace(prompt, messages=(*own, *said, *rest))


def _instructed(
    messages: Sequence[Message],
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The message with instructions that they begin with, if one is, and the others."""
    count = int(bool(messages) and messages[0].role in _INSTRUCTIONS)
    return tuple(messages[:count]), tuple(messages[count:])
