"""Counts the tokens of thinking in a reply."""

from model_zoo.chat.formats.events import Thinking
from serve_app.gateway.tasks import ReplyOpening


class ThinkingCounter:
    """Counts thinking in one reply, whose parts the ingress separates.

    Tokens whose text is not certain yet, such as those of tags, count like the preceding text. If a
    delta has both thinking and an answer, its tokens are divided in proportion to the characters.
    """

    def __init__(self, opening: ReplyOpening) -> None:
        self._parser = opening.format.parser({}, thinks=opening.thinks, formed=opening.formed)
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
