"""The thinking of a reply: its budget, and the number of its tokens."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from model_zoo.chat.formats.events import Thinking
from model_zoo.chat_model import Prompt
from model_zoo.grammars.thinking_budget import ThinkingBudget
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.engine.request import GenerationRequest
from runtime.errors import RequestError
from serve_app.messages.tasks import Conversation, ReplyOpening


def within_budget(
    request: GenerationRequest,
    source: Conversation,
    prompt: Prompt,
    opening: ReplyOpening | None,
    tokenizer: Tokenizer,
) -> GenerationRequest:
    """The request, with the thinking budget of its conversation `source`. `opening`: the start of
    the reply. Models without thinking need no limit. Raises RequestError if the budget's message
    contains a marker of the model's replies, which would end the thinking early."""
    end = None if opening is None else opening.format.thinking_end
    if opening is None or end is None or source.thinking_budget is None:
        return request
    if any(marker in source.budget_message for marker in opening.format.markup):
        raise RequestError('field "reasoning_budget_message" contains a marker of the model')
    message = tokenizer.encode(source.budget_message) if source.thinking_budget else []
    again = tokenizer.encode(end.again)

    def token_bytes(token: int) -> bytes:
        return prompt.markup.get(token) or tokenizer.token_bytes(token)

    grammar = ThinkingBudget(
        request.grammar,
        max(0, source.thinking_budget - prompt.thought),
        (*message, *tokenizer.encode(end.text, parse_special=True)),
        again[0] if again else None,
        partial(opening.parser, source.tools),
        token_bytes,
    )
    return dataclasses.replace(request, grammar=grammar)


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
