"""The request body of OpenAI's /v1/responses, and its fields that a response object repeats."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from model_zoo.grammars.constraint import CallRule, OutputForm
from runtime.errors import RequestError
from serve_app.api.fields import Body, Items, harmless, unserved
from serve_app.api.offered_tools import (
    OfferedTools,
    left_out,
    responses_choice,
    shown_choice,
    shown_tools,
)
from serve_app.api.openai import configured
from serve_app.api.output_forms import responses_form
from serve_app.api.responses_input import DECLARING, PlacedItem, image_bytes
from serve_app.api.responses_tools import ResponseTool, placed_tools, tools_in
from serve_app.api.tool_choice import ToolChoice, call_rule
from serve_app.config.options import OPENAI_BOUNDS, Options, number
from serve_app.gateway.model_registry import ServedModel

LOGPROBS = "message.output_text.logprobs"
# The values of `include`. Only log-probabilities depend on it: replies and lists always contain the
# URLs of images, and the other values concern items that this server never creates.
_INCLUDABLE = frozenset(
    {LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url"}
    | {"file_search_call.results", "web_search_call.results", "web_search_call.action.sources"}
    | {"computer_call_output.output.image_url", "code_interpreter_call.outputs"}
)
MAX_METADATA = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512


Summary = Literal["auto", "concise", "detailed"]


class ReasoningSettings(Body):
    effort: str | None = None
    summary: Summary | None = None  # any value: the whole reasoning, reported as its summary
    generate_summary: Summary | None = None  # the former name
    context: Any = harmless()
    mode: Any = harmless()

    def shown(self) -> dict[str, Any]:
        return {"effort": self.effort, "summary": self.summary or self.generate_summary}


class TextSettings(Body):
    format: Any = None
    verbosity: Any = harmless()  # no supported model uses it


class ResponsesBody(Body):
    holds_images: ClassVar[bool] = True
    model: str = ""
    input: str | Items[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool = False
    store: bool = True
    include: Items[str] = Field(default_factory=list)
    max_output_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_logprobs: Any = None
    reasoning: ReasoningSettings = ReasoningSettings()
    text: TextSettings = TextSettings()
    tools: Items[ResponseTool] = Field(default_factory=list)
    tool_choice: Any = None
    metadata: dict[str, str] = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"
    background: Any = unserved(False)
    background_options: Any = harmless()
    conversation: Any = unserved()
    prompt: Any = unserved()
    context_management: Any = unserved()
    moderation: Any = unserved()
    parallel_tool_calls: bool = True
    max_tool_calls: Any = harmless()  # of tools of OpenAI's servers
    access_programs: Any = harmless()
    client_metadata: Any = harmless()
    image: Any = harmless()
    stream_options: Any = harmless()
    user: Any = harmless()
    service_tier: Any = harmless()
    safety_identifier: Any = harmless()
    prompt_cache_key: Any = harmless()
    prompt_cache_retention: Any = harmless()
    prompt_cache_options: Any = harmless()
    # vLLM's:
    seed: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    stop: Any = None

    def image_bytes(self) -> int:
        return 0 if isinstance(self.input, str) else image_bytes(self.input)

    def check(self) -> None:
        """Raises RequestError for invalid values that parsing the fields does not detect."""
        unknown = next((each for each in self.include if each not in _INCLUDABLE), None)
        if unknown is not None:
            known = ", ".join(sorted(_INCLUDABLE))
            raise RequestError(f'field "include" has "{unknown[:80]}"; known are {known}')
        if len(self.metadata) > MAX_METADATA:
            raise RequestError(f'field "metadata" has more than {MAX_METADATA} entries')
        for key, value in self.metadata.items():
            if len(key) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_CHARACTERS:
                raise RequestError(
                    f'field "metadata" has a key of more than {MAX_KEY_CHARACTERS} or a value of '
                    f"more than {MAX_VALUE_CHARACTERS} characters"
                )

    def options(self, model: ServedModel) -> Options:
        limit = self.max_output_tokens
        if limit is not None:
            limit = int(number("max_output_tokens", limit, OPENAI_BOUNDS["max_tokens"]))
        return configured(self, model, limit)

    def output_form(self) -> OutputForm | None:
        """The form that the request demands of the reply's text."""
        return responses_form(self.text.format)

    def logprobs(self) -> int | None:
        """Number of alternatives to each token; None if log-probabilities are not included."""
        top = 0
        if self.top_logprobs is not None:
            top = int(number("top_logprobs", self.top_logprobs, OPENAI_BOUNDS["top_logprobs"]))
        if top and LOGPROBS not in self.include:
            raise RequestError(f'field "top_logprobs" needs "{LOGPROBS}" in "include"')
        return top if LOGPROBS in self.include else None

    def choice(self) -> ToolChoice:
        """How the model may call tools; names of none: it must not call any."""
        return responses_choice(self.tool_choice, self.left_out())

    def left_out(self) -> set[str]:
        """The types of the tools that are left out."""
        return {tool.type for tool in left_out(self.tools)}

    def offered(self, items: Sequence[PlacedItem]) -> OfferedTools:
        """The tools that the model may call: those of the request that are not left out, and those
        that `items`, the conversation, declare."""
        found = (
            tool
            for placed in items
            if placed.item["type"] in DECLARING
            for tool in placed_tools(f"{placed.place}.tools", tools_in(placed.place, placed.item))
        )
        return OfferedTools.of(self.tools, found)

    def calls(self, offered: OfferedTools, tools: tuple[dict[str, Any], ...]) -> CallRule | None:
        """How the model may call `tools`: the functions of `offered`, or none."""
        return call_rule(
            tools,
            self.choice(),
            strict=offered.strict(),
            parallel=self.parallel_tool_calls,
            schemas=offered.schema_fields(),
            inputs=offered.inputs(),
        )

    def facts(self, id: str, options: Options) -> dict[str, Any]:
        """The fields of the response object that do not depend on the reply."""
        return {
            "id": id,
            "object": "response",
            "background": False,
            "frequency_penalty": options.frequency_penalty or 0.0,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata,
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls,
            "presence_penalty": options.presence_penalty or 0.0,
            "previous_response_id": self.previous_response_id,
            "reasoning": self.reasoning.shown(),
            "service_tier": "default",
            "store": self.store,
            "temperature": options.temperature,
            "text": {"format": _shown_format(self.text.format)},
            "tool_choice": shown_choice(self.tool_choice, self.left_out()),
            "tools": shown_tools(self.tools),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": options.top_p,
            "truncation": self.truncation,
        }


def _shown_format(format: Any) -> dict[str, Any]:
    """`text.format` in the response object: the fields that `responses_form` reads."""
    if format is None or format["type"] != "json_schema":
        return {"type": "text" if format is None else format["type"]}
    shown = {name: format.get(name) for name in ("type", "name", "description", "schema")}
    return shown | {"strict": format.get("strict") is True}
