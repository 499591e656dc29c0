"""Fields about thinking in OpenAI's protocol and in extensions of it."""

from typing import Any

from pydantic import Field

from runtime.errors import RequestError
from serve_app.api.fields import Body, harmless
from serve_app.config.options import OPENAI_BOUNDS, number

# OpenAI's reasoning efforts and the corresponding levels of templates.
EFFORTS: dict[str, bool | str] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "max": "max",
    "xhigh": "max",
    "ultra": "max",
}
# The names of the budget in vLLM, llama.cpp (two) and Qwen's API.
BUDGETS = (
    "thinking_token_budget",
    "reasoning_budget_tokens",
    "thinking_budget_tokens",
    "thinking_budget",
)
MAX_MESSAGE_CHARACTERS = 1024


class ChatCompletionReasoning(Body):
    effort: str | None = None
    summary: Any = harmless()


class ThinkingFields(Body):
    """Fields about thinking in chat completions."""

    reasoning_effort: str | None = None
    reasoning: ChatCompletionReasoning = ChatCompletionReasoning()
    include_reasoning: bool = True
    thinking_token_budget: Any = None
    reasoning_budget_tokens: Any = None
    thinking_budget_tokens: Any = None
    thinking_budget: Any = None
    reasoning_budget_message: str = Field(default="", max_length=MAX_MESSAGE_CHARACTERS)

    @property
    def budget_wanted(self) -> int | None:
        """The thinking budget in tokens; -1: no limit; None: not given. Raises RequestError if the
        request uses several names of the field."""
        given = {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}
        if len(given) > 1:
            first, second = list(given)[:2]
            raise RequestError(f'fields "{first}" and "{second}" mean the same; give one of them')
        for name, value in given.items():
            return int(number(name, value, OPENAI_BOUNDS["thinking_token_budget"]))
        return None

    @property
    def thinking_wanted(self) -> bool | str | None:
        """Whether and how much to think: `reasoning.effort`, or else `reasoning_effort`."""
        effort = self.reasoning.effort
        return thinking_for(self.reasoning_effort if effort is None else effort)


def thinking_for(effort: str | None) -> bool | str | None:
    """Whether and how much to think for a value of OpenAI's `reasoning_effort`."""
    if effort is None:
        return None
    if effort not in EFFORTS:
        raise RequestError(
            f"invalid reasoning value: {effort!r} (must be one of {', '.join(EFFORTS)})"
        )
    return EFFORTS[effort]
