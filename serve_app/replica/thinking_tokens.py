"""Counts the tokens of thinking in a reply."""

from collections.abc import Sequence
from typing import Any

from model_zoo.chat.formats.events import Thinking
from serve_app.messages.tasks import ReplyOpening


class ThinkingCounter:
    """Counts thinking in one reply, whose parts the ingress separates. `tools`: those that the
    request declares.

    Tokens whose text is not certain yet, such as those of tags, count like the preceding text. If a
    delta has both thinking and an answer, its tokens are divided in proportion to the characters.
    """

    def __init__(self, opening: ReplyOpening, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._parser = opening.parser(tools)
        self._thinking = opening.thinks

    def count(self, text: str, tokens: int) -> int:
        """How many of the next `tokens` are thinking; `text`: the text that they make certain."""
        before, thought, other = self._thinking, 0, 0
        for event in self._parser.feed(text):
            self._thinking = isinstance(event, Thinking)
            size = len(getattr(event, "text", ""))
            if self._thinking:
                thought += size
            else:
                other += size
        if not thought + other:
            return tokens if before else 0
        return round(tokens * thought / (thought + other))
