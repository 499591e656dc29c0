"""The request body of OpenAI's /v1/responses, and its fields that a response object repeats."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from model_zoo.grammars.constraint import CallRule, OutputForm
from runtime.errors import RequestError
from serve_app.api.custom_tools import function_of, input_form
from serve_app.api.fields import Body, Items, harmless, unserved
from serve_app.api.openai import configured
from serve_app.api.output_forms import responses_form
from serve_app.api.responses_input import full_name, image_bytes
from serve_app.api.tool_choice import call_rule, responses_choice
from serve_app.api.tools import NAME, Function, described
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
# Tools of OpenAI's servers that agents offer in each request beside their own, such as Codex.
_OFFERED = ("web_search", "web_search_preview", "image_generation")
MAX_NAME_CHARACTERS = 256
MAX_METADATA = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512


class ResponseFunction(Body):
    """A function, or a custom tool, which has a `format` instead of parameters."""

    type: str = "function"
    name: str | None = Field(default=None, pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    format: Any = None
    strict: bool = False
    defer_loading: Any = harmless()
    output_schema: Any = harmless()
    asynchronous: Any = harmless(alias="async")
    allowed_callers: Any = harmless()


class ResponseTool(ResponseFunction):
    """A tool, or a namespace of tools. Those of OpenAI's servers have other types."""

    tools: Items[ResponseFunction] = Field(default_factory=list)


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

    def left_out(self) -> list[str]:
        """The types of tools of OpenAI's servers that are left out, because there are others."""
        offered = [tool.type for tool in self.tools if tool.type in _OFFERED]
        return offered if len(offered) < len(self.tools) else []

    def functions(self) -> tuple[dict[str, Any], ...]:
        """The tools as templates read them, unless the request forbids their use. Names of a
        namespace's tools begin with its own."""
        functions = [_function(each) for each in self._placed()]
        declared = described(functions, name_field="name")
        return () if self.tool_choice == "none" else declared

    def custom(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(each.full_name for each in self._placed() if each.tool.type == "custom")

    def namespaces(self) -> dict[str, str]:
        """The namespaces of `functions` by their names."""
        return {
            full_name(tool.name, each.name): tool.name
            for tool in self.tools
            for each in tool.tools
            if tool.name is not None and each.name is not None
        }

    def calls(self, tools: tuple[dict[str, Any], ...]) -> CallRule | None:
        """How the `functions` may be called."""
        placed, choice = [*self._placed()], responses_choice(self.tool_choice)
        strict = [each.full_name for each in placed if each.tool.strict]
        inputs = {each.full_name: form for each in placed if (form := each.input_form())}
        parallel = self.parallel_tool_calls
        return call_rule(tools, choice, strict=strict, parallel=parallel, inputs=inputs)

    def _placed(self) -> Iterator["_PlacedTool"]:
        """The tools, also those in namespaces."""
        for index, tool in self._kept():
            place = f"tools[{index}]"
            if tool.type == "namespace":
                namespace = _name(place, tool)
                for number, each in enumerate(tool.tools):
                    yield _PlacedTool(f"{place}.tools[{number}]", each, namespace)
            else:
                yield _PlacedTool(place, tool)

    def _kept(self) -> list[tuple[int, ResponseTool]]:
        """The tools that are not left out, with their indices."""
        left_out = frozenset(self.left_out())
        return [each for each in enumerate(self.tools) if each[1].type not in left_out]

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
            "tool_choice": _shown_choice(self.tool_choice),
            "tools": [_shown(tool) for _, tool in self._kept()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": options.top_p,
            "truncation": self.truncation,
        }


@dataclass(frozen=True, slots=True)
class _PlacedTool:
    """A function or a custom tool, with its place in the request and its namespace."""

    place: str
    tool: ResponseFunction
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        return full_name(self.namespace, _name(self.place, self.tool))

    def input_form(self) -> OutputForm | None:
        """The form of the input of a custom tool."""
        if self.tool.type != "custom":
            return None
        return input_form(self.place, self.tool.format, nested=False)


def _function(placed: _PlacedTool) -> Function:
    place, tool = placed.place, placed.tool
    if tool.type not in ("function", "custom"):
        raise RequestError(f'field "{place}.type" is "{tool.type[:80]}", which is not served')
    name = placed.full_name
    if len(name) > MAX_NAME_CHARACTERS:
        raise RequestError(
            f'field "{place}.name" has more than {MAX_NAME_CHARACTERS} characters with its '
            "namespace"
        )
    if tool.type == "custom":
        return function_of(name, tool.description, placed.input_form())
    return Function(name=name, description=tool.description, parameters=tool.parameters)


def _name(place: str, tool: ResponseFunction) -> str:
    if tool.name is None:
        raise RequestError(f'field "{place}.name" is required')
    return tool.name


def _shown(tool: ResponseFunction) -> dict[str, Any]:
    shown = {"type": tool.type, "name": tool.name, "description": tool.description}
    if isinstance(tool, ResponseTool) and tool.type == "namespace":
        return shown | {"tools": [_shown(each) for each in tool.tools]}
    if tool.type == "custom":
        return shown | {"format": tool.format or {"type": "text"}}
    return shown | {"parameters": tool.parameters, "strict": tool.strict}


def _shown_format(format: Any) -> dict[str, Any]:
    """`text.format` in the response object: the fields that `responses_form` reads."""
    if format is None or format["type"] != "json_schema":
        return {"type": "text" if format is None else format["type"]}
    texts = {name: format.get(name) for name in ("name", "description")}
    known = {name: text if isinstance(text, str) else None for name, text in texts.items()}
    strict = format.get("strict") is True
    return {"type": "json_schema", **known, "schema": format["schema"], "strict": strict}


def _shown_choice(value: Any) -> Any:
    """`tool_choice` in the response object: the fields that `responses_choice` reads."""
    if isinstance(value, str):
        return value
    choice = responses_choice(value)
    if choice.names is None:
        return "auto"
    if value["type"] != "allowed_tools":
        return {"type": value["type"], "name": value["name"]}
    tools = [{"type": tool["type"], "name": tool["name"]} for tool in value["tools"]]
    return {"type": "allowed_tools", "mode": value["mode"], "tools": tools}
