"""Anthropic's protocol: /v1/messages and its count of tokens."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from model_zoo.chat.messages import Message, ReplyStart, ToolCall
from model_zoo.grammars.constraint import CallRule, OutputForm
from runtime.errors import RequestError
from serve_app.api import tool_choice
from serve_app.api.access import allowed_models
from serve_app.api.anthropic_reply import MessageEncoder, error_body
from serve_app.api.chat_task import chat_task
from serve_app.api.content_parts import check_type, joined, string
from serve_app.api.fields import Body, BodyReader, Items, Objects, harmless, unserved
from serve_app.api.json_values import check_value
from serve_app.api.output_forms import schema_format
from serve_app.api.refusals import UnservedFieldError
from serve_app.api.reply import Reply, WholeEncoder, WholeReply
from serve_app.api.reply_reader import ReplyReader
from serve_app.api.request_images import ImageReader, UnreadImage, UnreadMessage, from_url
from serve_app.api.tenant import tenant_id
from serve_app.api.tools import MAX_ARGUMENTS_BYTES, NAME, Function, described
from serve_app.config.options import BOUNDS, OLLAMA_DEFAULTS, Options, number, stop_strings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import ChatDelta, Conversation, PromptTask

# As in Ollama, "xhigh" means the same as "high".
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "max"}
# "between_tools": off, except for progress reports, which no supported model writes.
THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": False}
# "updates", of the beta endpoint, shows the thinking as "summarized" does.
DISPLAYS = ("summarized", "omitted", "updates")
# Claude Code begins the system prompt with a line for Anthropic's servers. In many versions it has
# a hash of the request, so that no prompt would have a cached prefix.
_ATTRIBUTION = "x-anthropic-billing-header:"
_BLOCKS = {
    "user": ("text", "image", "document", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
# Fields of content blocks. Those of `_MARKED` have no effect.
_MARKED: dict[str, Any] = {
    "cache_control": {"type": {}, "ttl": {}, "scope": {}},
    **{name: {} for name in ("citations", "is_error", "caller", "toolset_name", "signature")},
    "transformations": {},
}
_SOURCE: dict[str, Any] = {name: {} for name in ("type", "media_type", "data", "url")}
_PART: dict[str, Any] = {"type": {}, "text": {}, "source": _SOURCE, **_MARKED}
_SHOWN: dict[str, Any] = {
    **_PART,
    "source": {**_SOURCE, "content": _PART},
    **{name: {} for name in ("title", "context", "tool_name")},
}
BLOCK: dict[str, Any] = {
    **_SHOWN,
    **{name: {} for name in ("tool_use_id", "id", "name", "input", "thinking", "data")},
    "content": _SHOWN,
}


class Turn(Body):
    role: str
    content: Annotated[str | Items[Any], Objects(BLOCK)]

    @property
    def blocks(self) -> list[Any]:
        return _blocks(self.content)


class DeclaredTool(Body):
    """A tool of the client. Tools of Anthropic's servers have other types and no schema."""

    name: str = Field(pattern=NAME)
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: Any = harmless()
    strict: bool = False
    input_examples: Any = harmless()
    eager_input_streaming: Any = harmless()
    allowed_callers: Any = harmless()
    defer_loading: Any = harmless()


class RequestedChoice(Body):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingChoice(Body):
    type: str
    budget_tokens: Any = harmless()
    display: str | None = None


class OutputSettings(Body):
    effort: str | None = None
    format: Any = None
    task_budget: Any = harmless()


class MessagesBody(Body):
    holds_images: ClassVar[bool] = True
    model: str = ""
    max_tokens: Any = None
    messages: Items[Turn] = Field(default_factory=list)
    system: Annotated[str | Items[Any], Objects(_SHOWN)] = ""
    stream: bool = False
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    stop_sequences: Any = None
    tools: Items[DeclaredTool] = Field(default_factory=list)
    tool_choice: RequestedChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputSettings | None = None
    output_format: Any = None
    container: Any = unserved()
    mcp_servers: Any = unserved()
    metadata: Any = harmless()
    cache_control: Any = harmless()
    context_management: Any = harmless()  # removal of old tool results by Anthropic's servers
    service_tier: Any = harmless()
    inference_geo: Any = harmless()
    speed: Any = harmless()
    diagnostics: Any = harmless()
    user_profile_id: Any = harmless()
    workspace_id: Any = harmless()
    # Fields of the beta endpoint, which has the same path:
    thread: Any = unserved()
    fallbacks: Any = harmless()
    compaction: Any = harmless()
    billing_policy: Any = harmless()
    fallback_credit_token: Any = harmless()

    def image_bytes(self) -> int:
        return sum(_image_bytes(block) for turn in self.messages for block in turn.blocks)


@dataclass(frozen=True, slots=True)
class AnthropicMessages:
    """Answers /v1/messages and /v1/messages/count_tokens."""

    backend: ChatBackend
    images: ImageReader
    bodies: BodyReader

    async def create(self, request: Request) -> Response:
        body = await self.bodies.read(MessagesBody, request)
        model = await self.backend.served(body.model, allowed_models(request))
        options = _configured(body, model)
        output, (tools, calls) = _output(body), await self.bodies.convert(request, _tools, body)
        prompt = await self._conversation(request, body, model, tools)
        task = chat_task(request, model, options, prompt, output=output, calls=calls)
        own = options.stop if body.stop_sequences is not None else None
        shown = body.thinking is None or body.thinking.display != "omitted"
        encoder = MessageEncoder(
            body.model, ReplyReader(prompt.tools), own or (), shows_thinking=shown
        )
        return Reply(self.backend.generate(task), encoder, stream=body.stream)

    async def count(self, request: Request) -> Response:
        """The tokens of the prompt that the same request to /v1/messages would have."""
        body = await self.bodies.read(MessagesBody, request)
        model = await self.backend.served(body.model, allowed_models(request))
        tools, _ = await self.bodies.convert(request, _tools, body)
        task = PromptTask(
            uuid.uuid4().hex,
            model.name,
            await self._conversation(request, body, model, tools),
            context_tokens=model.options.num_ctx,
            tenant=tenant_id(request),
        )
        return WholeReply(self.backend.generate(task), _COUNT)

    async def _conversation(
        self,
        request: Request,
        body: MessagesBody,
        model: ServedModel,
        tools: tuple[dict[str, Any], ...],
    ) -> Conversation:
        thinking = _thinking(body)
        unread = await self.bodies.convert(request, _unread_messages, body)
        messages = await self.images.messages(model, unread, tenant=tenant_id(request))
        continued = body.messages[-1].role == "assistant"
        return Conversation(
            messages,
            thinking,
            tools=tools,
            thinking_optional=True,
            reply=ReplyStart.CONTINUED if continued else ReplyStart.NEW,
        )


def _counted(delta: ChatDelta) -> dict[str, Any]:
    assert delta.prompt_tokens is not None
    return {"input_tokens": len(delta.prompt_tokens.ids)}


_COUNT = WholeEncoder(_counted, error_body)


def _configured(body: MessagesBody, model: ServedModel) -> Options:
    """The options of a request: its own, then the model's configured ones, then Ollama's
    defaults.
    """
    most = body.max_tokens
    if most is None or (isinstance(most, int | float) and most < 1):
        raise RequestError("max_tokens is required and must be positive")
    values = {
        name: number(name, value, BOUNDS[name])
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(body, name)) is not None
    }
    stop = body.stop_sequences
    given = Options(
        **values,  # type: ignore[arg-type]
        num_predict=int(number("max_tokens", most, BOUNDS["num_predict"])),
        stop=None if stop is None else stop_strings(stop, noun="field", name="stop_sequences"),
    )
    return given.over(model.options.over(OLLAMA_DEFAULTS))


def _thinking(body: MessagesBody) -> bool | str | None:
    """Whether and how much to think; the effort applies where `thinking` does not decide."""
    settled = None
    if body.thinking is not None:
        settled = THINKING[_one_of("thinking.type", body.thinking.type, THINKING)]
        _one_of("thinking.display", body.thinking.display or DISPLAYS[0], DISPLAYS)
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None:
        effort = EFFORTS[_one_of("output_config.effort", effort, EFFORTS)]
    return effort if settled is None else settled


def _output(body: MessagesBody) -> OutputForm | None:
    """The form of the text; `output_format` is the older field."""
    if body.output_config is not None and body.output_config.format is not None:
        return schema_format("output_config.format", body.output_config.format)
    return schema_format("output_format", body.output_format)


def _tools(body: MessagesBody) -> tuple[tuple[dict[str, Any], ...], CallRule | None]:
    """The declared tools, unless the request forbids their use, and how to call them."""
    functions = []
    for index, tool in enumerate(body.tools):
        place = f"tools[{index}]"
        if tool.type != "custom":
            raise RequestError(f'field "{place}.type" is "{tool.type}", which is not served')
        if tool.input_schema is None:
            raise RequestError(f'field "{place}.input_schema" is required')
        functions.append(
            Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
        )
    tools = described(functions, name_field="name")
    given = body.tool_choice or RequestedChoice(type="auto")
    kind = _one_of("tool_choice.type", given.type, ("auto", "any", "tool", "none"))
    if kind == "none":
        return (), None
    if kind == "tool" and given.name is None:
        raise RequestError('field "tool_choice.name" is required')
    names = None if given.name is None or kind != "tool" else (given.name,)
    choice = tool_choice.ToolChoice(names, required=kind != "auto")
    strict = [tool.name for tool in body.tools if tool.strict]
    parallel = not given.disable_parallel_tool_use
    return tools, tool_choice.call_rule(tools, choice, strict=strict, parallel=parallel)


def _one_of(place: str, value: str, known: Any) -> str:
    if value not in known:
        raise RequestError(
            f'field "{place}" is "{value[:80]}"; it must be one of {", ".join(known)}'
        )
    return value


def _unread_messages(body: MessagesBody) -> list[UnreadMessage]:
    """The conversation; each tool result is a message of its own."""
    if not body.messages:
        raise RequestError("messages is required")
    system = "".join(map(_unattributed, _texts("system", body.system)))
    unread = [UnreadMessage.of(Message("system"), system)] if system else []
    for index, turn in enumerate(body.messages):
        place = f"messages[{index}]"
        types = _BLOCKS[_one_of(f"{place}.role", turn.role, _BLOCKS)]
        for number_, block in enumerate(turn.blocks):
            check_type(f"{place}.content[{number_}]", block, types)
        if turn.role == "assistant":
            unread.append(_assistant(f"{place}.content", turn.blocks))
        elif turn.role == "system":
            text = "".join(_texts(f"{place}.content", turn.content))
            unread.append(UnreadMessage.of(Message("system"), text))
        else:
            unread += _user(f"{place}.content", turn.blocks)
    return unread


def _user(place: str, blocks: list[Any]) -> Iterator[UnreadMessage]:
    """The tool results, then the rest as one message."""
    placed = [(f"{place}[{index}]", block) for index, block in enumerate(blocks)]
    results = [(each, block) for each, block in placed if block["type"] == "tool_result"]
    for each, block in results:
        identity = string(each, block, "tool_use_id")
        content = _content(f"{each}.content", _blocks(block.get("content") or ""))
        yield UnreadMessage.of(Message("tool", tool_call_id=identity), content)
    rest = [(each, block) for each, block in placed if block["type"] != "tool_result"]
    if rest or not results:
        yield UnreadMessage.of(Message("user"), joined(_parts(rest)))


def _assistant(place: str, blocks: list[Any]) -> UnreadMessage:
    """The message of an assistant's blocks. Redacted thinking, which only Anthropic can decrypt, is
    ignored."""
    text = thinking = ""
    calls = []
    for index, block in enumerate(blocks):
        each = f"{place}[{index}]"
        match block["type"]:
            case "text":
                text += string(each, block, "text")
            case "thinking":
                thinking += string(each, block, "thinking")
            case "tool_use":
                calls.append(_call(each, block))
    return UnreadMessage.of(
        Message("assistant", thinking=thinking or None, tool_calls=tuple(calls)), text
    )


def _call(place: str, block: dict[str, Any]) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise RequestError(f'field "{place}.input" must be an object')
    check_value(f"{place}.input", arguments, max_bytes=MAX_ARGUMENTS_BYTES)
    return ToolCall(string(place, block, "name"), arguments, string(place, block, "id"))


def _content(place: str, blocks: list[Any]) -> str | tuple[str | UnreadImage, ...]:
    """The texts and images of a tool result in order."""
    placed = [(f"{place}[{index}]", block) for index, block in enumerate(blocks)]
    for each, block in placed:
        check_type(each, block, ("text", "image", "document", "tool_reference"))
    return joined(_parts(placed))


def _parts(placed: list[tuple[str, Any]]) -> list[str | UnreadImage]:
    """The texts and images of blocks; documents and references to tools have lines of their own."""
    parts: list[str | UnreadImage] = []
    for place, block in placed:
        if block["type"] in ("document", "tool_reference"):
            _end_line(parts)
        parts += _document(place, block) if block["type"] == "document" else [_part(place, block)]
    return parts


def _end_line(parts: list[str | UnreadImage]) -> None:
    before = parts[-1] if parts else None
    if isinstance(before, str) and before[-1:] != "\n":
        parts.append("\n")


def _document(place: str, block: dict[str, Any]) -> list[str | UnreadImage]:
    """The title, the context and the content of a document, in tags as Anthropic's guides write
    documents into prompts."""
    if _cites(block.get("citations")):
        raise UnservedFieldError(f"{place}.citations")
    parts: list[str | UnreadImage] = ["<document>\n"]
    for name in ("title", "context"):
        if block.get(name):
            parts.append(f"<{name}>{string(place, block, name)}</{name}>\n")
    parts += _document_content(f"{place}.source", _source(place, block))
    _end_line(parts)
    return [*parts, "</document>\n"]


def _document_content(place: str, source: dict[str, Any]) -> list[str | UnreadImage]:
    match source.get("type"):
        case "text":
            return [string(place, source, "data")]
        case "content":
            blocks = _blocks(source.get("content") or "")
            for index, block in enumerate(blocks):
                check_type(f"{place}.content[{index}]", block, ("text", "image"))
            return [_part(f"{place}.content[{i}]", block) for i, block in enumerate(blocks)]
    raise RequestError(
        f'field "{place}.type" is "{str(source.get("type"))[:80]}"; documents must be of type text '
        "or content. PDF files are not served: send their text"
    )


def _cites(citations: Any) -> bool:
    return isinstance(citations, dict) and citations.get("enabled") not in (None, False)


def _texts(place: str, content: str | list[Any]) -> list[str]:
    blocks = _blocks(content)
    for index, block in enumerate(blocks):
        check_type(f"{place}[{index}]", block, ("text",))
    return [string(f"{place}[{index}]", block, "text") for index, block in enumerate(blocks)]


def _unattributed(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text


def _part(place: str, block: dict[str, Any]) -> str | UnreadImage:
    if block["type"] == "text":
        return string(place, block, "text")
    if block["type"] == "tool_reference":  # a tool that a search has found; "tools" declares it
        return f"{string(place, block, 'tool_name')}\n"
    source, place = _source(place, block), f"{place}.source"
    match source.get("type"):
        case "base64":
            return UnreadImage(f"{place}.data", string(place, source, "data"))
        case "url":
            return from_url(f"{place}.url", string(place, source, "url"))
    raise RequestError(
        f"invalid image source type: {str(source.get('type'))[:80]}. Only base64 images and URLs "
        f'are supported (field "{place}.type")'
    )


def _source(place: str, block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise RequestError(f'field "{place}.source" must be an object')
    return source


def _blocks(content: Any) -> list[Any]:
    """The content blocks; a plain string stands for one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else [content]


def _image_bytes(block: Any) -> int:
    """Size of the base64 data of an image, or of the images of a tool result or a document."""
    return sum(_data_bytes(each) for outer in _inner(block) for each in _inner(outer))


def _inner(block: Any) -> list[Any]:
    """The blocks of a tool result or a document; any other block itself."""
    if not isinstance(block, dict) or block.get("type") not in ("tool_result", "document"):
        return [block]
    holder = block if block["type"] == "tool_result" else block.get("source")
    return _blocks(holder.get("content") or "") if isinstance(holder, dict) else []


def _data_bytes(block: Any) -> int:
    is_image = isinstance(block, dict) and block.get("type") == "image"
    source = block.get("source") if is_image else None
    data = source.get("data") if isinstance(source, dict) else None
    return len(data) if isinstance(data, str) else 0
