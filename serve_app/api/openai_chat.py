"""The OpenAI-compatible protocol: /v1/chat/completions."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from model_zoo.chat.formats.events import (
    CallAborted,
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Text,
    Thinking,
)
from model_zoo.chat.messages import Message, ReplyStart, ToolCall
from runtime.engine.request import FinishReason
from runtime.errors import RequestError
from serve_app.api.access import allowed_models, key_of
from serve_app.api.choices import choice_count, choice_tasks, generate_choices
from serve_app.api.content_parts import check_type, joined, string
from serve_app.api.custom_tools import (
    ChatCompletionTool,
    call_arguments,
    custom_names,
    declared_tools,
    input_forms,
    input_of,
    strict_tools,
)
from serve_app.api.fields import Body, BodyReader, Items, Objects, harmless, unserved
from serve_app.api.json_values import check_value
from serve_app.api.openai import (
    ROLES_BY_NAME,
    ChoicesEncoder,
    CompletionFields,
    ReplyKind,
    configured,
    logprob_entry,
    openai_task,
)
from serve_app.api.reply import Reply
from serve_app.api.reply_reader import Call, Collected, ReplyReader
from serve_app.api.request_images import ImageReader, UnreadImage, UnreadMessage, from_url
from serve_app.api.tenant import tenant_id
from serve_app.api.thinking_fields import ThinkingFields
from serve_app.api.tool_choice import call_rule, openai_choice
from serve_app.api.tools import decoded_arguments, schema_fields
from serve_app.api.vllm_extras import with_extras
from serve_app.config.options import OPENAI_BOUNDS, Options, number
from serve_app.gateway.backend import ChatBackend
from serve_app.messages.tasks import ChatDelta, Conversation, TokenLogprob

# Variables that the server sets itself, and names that would replace the template.
_RESERVED = frozenset(
    {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"}
    | {"continue_final_message", "chat_template", "tokenize"}
)
KIND = ReplyKind("chat.completion", "chat.completion.chunk", "chatcmpl")
MAX_NAME_CHARACTERS = 256
MAX_VARIABLES_BYTES = 64 * 1024
# Fields of the parts of a message; those after `refusal` have no effect.
PART: dict[str, Any] = {
    "type": {},
    "image_url": {"url": {}, "detail": {}},
    "text": {},
    "refusal": {},
    "prompt_cache_breakpoint": {"mode": {}},
    "cache_control": {"type": {}, "ttl": {}},
}


class ChatCompletionFunction(Body):
    name: str
    arguments: str = "{}"


class ChatCompletionInput(Body):
    name: str
    input: str


class ChatCompletionCall(Body):
    """A call of a function, or of a custom tool."""

    id: str | None = None
    function: ChatCompletionFunction | None = None
    custom: ChatCompletionInput | None = None
    type: Any = harmless()
    index: Any = harmless()


class ChatCompletionMessage(Body):
    role: str
    content: Annotated[str | Items[Any], Objects(PART)] = ""
    name: str | None = None
    refusal: Any = harmless()
    annotations: Any = harmless()
    audio: Any = unserved()
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: Any = unserved()
    tool_calls: Items[ChatCompletionCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    @property
    def images(self) -> list[Any]:
        """The URLs of image parts."""
        if isinstance(self.content, str):
            return []
        images = (part.get("image_url") for part in self.content if _is_image(part))
        return [image.get("url") if isinstance(image, dict) else image for image in images]

    def image_bytes(self) -> int:
        return sum(len(url) for url in self.images if isinstance(url, str))


class ChatCompletionBody(CompletionFields, ThinkingFields):
    holds_images: ClassVar[bool] = True
    messages: Items[ChatCompletionMessage]
    max_completion_tokens: Any = None
    best_of: Any = unserved(1)
    logprobs: bool = False
    top_logprobs: Any = None
    tools: Items[ChatCompletionTool] = Field(default_factory=list)
    tool_choice: Any = None
    functions: Any = unserved()
    function_call: Any = unserved("none", "auto")
    modalities: Any = unserved(["text"])
    audio: Any = unserved()
    web_search_options: Any = unserved(empty_object_means_on=True)
    moderation: Any = unserved()
    parallel_tool_calls: bool = True
    prediction: Any = harmless()
    verbosity: Any = harmless()  # no supported model uses it
    # Fields of vLLM:
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: Any = unserved()
    chat_template: Any = unserved()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Any = unserved(False)
    mm_processor_kwargs: Any = unserved()

    def image_bytes(self) -> int:
        return sum(message.image_bytes() for message in self.messages)


@dataclass(frozen=True, slots=True)
class OpenAIChat:
    """Answers /v1/chat/completions."""

    backend: ChatBackend
    images: ImageReader
    bodies: BodyReader

    async def complete(self, request: Request) -> Response:
        body = await self.bodies.read(ChatCompletionBody, request)
        model = await self.backend.served(body.model, allowed_models(request))
        options, logprobs = configured(body, model, _max_tokens(body)), _logprobs(body)
        options = Options(thinking_token_budget=body.budget_wanted).over(options)
        count = choice_count("n", body.n)
        choice, output = openai_choice(body.tool_choice), body.output_form()
        given = () if choice.names == () else body.tools
        tools = await self.bodies.convert(request, declared_tools, given)
        calls = call_rule(
            tools,
            choice,
            strict=strict_tools(given),
            parallel=body.parallel_tool_calls,
            schemas=schema_fields([tool.function for tool in given]),
            inputs=input_forms(given),
        )
        tenant = tenant_id(request)
        variables = template_variables(body.chat_template_kwargs)
        reply = reply_start(body.add_generation_prompt, body.continue_final_message)
        unread = await self.bodies.convert(request, unread_messages_of, body.messages, self.images)
        messages = await self.images.messages(model, unread, tenant=tenant)
        prompt = Conversation(
            messages,
            body.thinking_wanted,
            variables=variables,
            tools=tools,
            reply=reply,
            budget_message=body.reasoning_budget_message,
        )
        task = openai_task(
            request, model, options, prompt, logprobs=logprobs, output=output, calls=calls
        )
        task = with_extras(task, body, key_of(request.scope))
        shown, custom = body.include_reasoning, custom_names(given)
        encoder = ChoicesEncoder(
            KIND,
            body.model,
            body.request_id or task.id,
            [ChatChoice(n, ReplyReader(tools), custom, shows_thinking=shown) for n in range(count)],
            usage_wanted=body.usage_wanted,
            continuous_usage=body.continuous_usage,
        )
        deltas = generate_choices(self.backend, choice_tasks(task, [task.prompt], count), count)
        return Reply(deltas, encoder, stream=body.stream)


class ChatChoice:
    """One choice of a chat completion. `reader` separates its parts. `custom`: the names of custom
    tools. Without `shows_thinking`, the thinking is left out.

    A stream sends the call of a function while it is generated, so a malformed or cut one has
    incomplete arguments. In a single reply it is text, and so are calls of custom tools.
    """

    def __init__(
        self,
        index: int,
        reader: ReplyReader,
        custom: Set[str] = frozenset(),
        *,
        shows_thinking: bool = True,
    ) -> None:
        self._index = index
        self._reader = reader
        self._custom = custom
        self._shows_thinking = shows_thinking
        self._collected = Collected()
        self._begun = False
        self._calls = False  # whether the reply has calls

    def chunks(self, delta: ChatDelta) -> list[dict[str, Any]]:
        parts = [part for event in self._reader.read(delta) if (part := self._part(event))]
        if not parts and (delta.logprobs or not self._begun):
            parts = [{"content": ""}]
        logprobs, chunks = delta.logprobs, []
        for part in parts:
            chunks.append(self._chunk(self._role() | part, None, logprobs))
            logprobs = ()
        if delta.finish is not None:
            ending = {"stop_reason": delta.matched}
            chunks.append(self._chunk({}, self._finish(delta)) | ending)
        return chunks

    def whole(self, delta: ChatDelta) -> dict[str, Any]:
        collected = self._collected
        for each in self._reader.read(delta):
            collected.add(each)
        calls = [self._whole_call(call) for call in collected.calls.values()]
        self._calls = bool(calls)
        message: dict[str, Any] = {"role": "assistant", "content": collected.text}
        if collected.thinking and self._shows_thinking:
            message |= _thinking_fields(collected.thinking)
        if calls:
            message |= {"content": collected.text or None, "tool_calls": calls}
        return {
            "index": self._index,
            "message": message,
            "finish_reason": self._finish(delta),
            "stop_reason": delta.matched,
            "logprobs": _content(delta.logprobs),
        }

    def _part(self, event: Event) -> dict[str, Any] | None:
        """The delta of the chunk for an event; None if it needs no chunk. A call of a custom tool
        is sent when it is complete."""
        calls = self._collected.calls
        custom = isinstance(event, CallAborted) and self._is_custom(event.index)
        self._collected.add(event)
        match event:
            case Text(text):
                return {"content": text}
            case Thinking(text) if self._shows_thinking:
                return _thinking_fields(text)
            case CallBegin(index, name) if name not in self._custom:
                self._calls = True
                called = {"name": name, "arguments": ""}
                call = {"id": calls[index].id, "type": "function", "function": called}
                return {"tool_calls": [{"index": index, **call}]}
            case CallArguments(index, piece) if not self._is_custom(index):
                return {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            case CallEnd(index) if self._is_custom(index):
                self._calls = True
                return {"tool_calls": [{"index": index, **self._whole_call(calls[index])}]}
            case CallAborted(_, text) if custom:
                return {"content": text}
        return None

    def _is_custom(self, index: int) -> bool:
        return self._collected.calls[index].name in self._custom

    def _whole_call(self, call: Call) -> dict[str, Any]:
        if call.name in self._custom:
            given = {"name": call.name, "input": input_of(call)}
            return {"id": call.id, "type": "custom", "custom": given}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}

    def _role(self) -> dict[str, Any]:
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return role

    def _finish(self, delta: ChatDelta) -> str:
        assert delta.finish is not None
        called = delta.finish is FinishReason.STOP and self._calls
        return "tool_calls" if called else delta.finish.value

    def _chunk(
        self, message: dict[str, Any], finish: str | None, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self._index, "delta": message, "finish_reason": finish}
        if logprobs:
            choice["logprobs"] = _content(logprobs)
        return choice


def unread_messages_of(
    messages: Sequence[ChatCompletionMessage], images: ImageReader
) -> list[UnreadMessage]:
    """The messages with the calls that they make. Raises RequestErrors that name the field."""
    if not messages:
        raise RequestError("[] is too short - 'messages'")
    images.check_count(sum(len(each.images) for each in messages))
    unread = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        calls = tuple(
            _call(f"{place}.tool_calls[{n}]", c) for n, c in enumerate(message.tool_calls)
        )
        unread.append(_unread_message(index, message, calls))
    return unread


def _thinking_fields(text: str) -> dict[str, str]:
    """The thinking under both names in use: `reasoning` (OpenRouter, Ollama) and
    `reasoning_content` (DeepSeek, vLLM)."""
    return {"reasoning": text, "reasoning_content": text}


def _call(place: str, call: ChatCompletionCall) -> ToolCall:
    if call.custom is not None:
        return ToolCall(call.custom.name, call_arguments(call.custom.input), call.id)
    if call.function is None:
        raise RequestError(f'field "{place}.function" is required')
    arguments = decoded_arguments(f"{place}.function.arguments", call.function.arguments)
    return ToolCall(call.function.name, arguments, call.id)


def _unread_message(
    index: int, message: ChatCompletionMessage, calls: tuple[ToolCall, ...]
) -> UnreadMessage:
    role = message.role.lower()
    if role == "function":
        raise RequestError(
            f'field "messages[{index}].role" is "function", which is not served; use "tool"'
        )
    if message.name is not None and len(message.name) > MAX_NAME_CHARACTERS:
        raise RequestError(
            f'field "messages[{index}].name" has {len(message.name):,} characters; at most '
            f"{MAX_NAME_CHARACTERS} are accepted"
        )
    content = _content_of(f"messages[{index}].content", message.content)
    parts = Message(
        ROLES_BY_NAME.get(role, role),
        thinking=message.reasoning_content or message.reasoning,
        tool_calls=calls,
        tool_call_id=message.tool_call_id if role == "tool" else None,
        name=message.name,
    )
    return UnreadMessage.of(parts, content)


def _content_of(place: str, content: str | list[Any]) -> str | tuple[str | UnreadImage, ...]:
    """The content of a message. Adjacent texts are separated by a blank line, as separate messages
    are."""
    if isinstance(content, str):
        return content
    parts = (_part(f"{place}[{index}]", part) for index, part in enumerate(content))
    return joined(parts, separator="\n\n")


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _part(place: str, part: Any) -> str | UnreadImage:
    check_type(place, part, ("text", "image_url", "refusal"))
    if part["type"] == "image_url":
        return _image(f"{place}.image_url", part.get("image_url"))
    return string(place, part, part["type"])  # a refusal is the text of an earlier answer


def _image(place: str, image: Any) -> UnreadImage:
    """`detail` is ignored: the model determines the resolution."""
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise RequestError(f'invalid image input: field "{place}" must have a URL, a string')
    return from_url(place, url)


def _max_tokens(body: ChatCompletionBody) -> int | None:
    """The limit of the answer; -1: none. The newer field takes precedence; both are validated."""
    values = [
        int(number(name, value, OPENAI_BOUNDS[name]))
        for name in ("max_completion_tokens", "max_tokens")
        if (value := getattr(body, name)) is not None
    ]
    return values[0] if values else None


def reply_start(opened: bool, continued: bool) -> ReplyStart:
    """What the prompt ends with, for vLLM's `add_generation_prompt` and `continue_final_message`.
    Raises RequestError if both are set."""
    if opened and continued:
        raise RequestError('field "continue_final_message" needs "add_generation_prompt": false')
    if continued:
        return ReplyStart.CONTINUED
    return ReplyStart.NEW if opened else ReplyStart.NONE


def template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Template variables of the request. Raises RequestError for reserved names and oversized
    values.
    """
    reserved = sorted(_RESERVED & given.keys())
    if reserved:
        raise RequestError(f'field "chat_template_kwargs.{reserved[0]}" cannot be set by a request')
    check_value("chat_template_kwargs", given, max_bytes=MAX_VARIABLES_BYTES)
    return given


def _logprobs(body: ChatCompletionBody) -> int | None:
    if body.top_logprobs is None:
        return 0 if body.logprobs else None
    top = int(number("top_logprobs", body.top_logprobs, OPENAI_BOUNDS["top_logprobs"]))
    if top and not body.logprobs:
        raise RequestError('field "top_logprobs" needs "logprobs": true')
    return top if body.logprobs else None


def _content(logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
    if not logprobs:
        return None
    return {"content": [logprob_entry(each) for each in logprobs], "refusal": None}
