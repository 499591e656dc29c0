"""Ollama's protocol: /api/chat and /api/generate."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from model_zoo.chat.formats.events import CallAborted, CallEnd, Event, Text, Thinking
from model_zoo.chat.messages import ImagePart, Message, ReplyStart, ToolCall
from model_zoo.multimodal.image_tags import image_places, with_images
from runtime.engine.request import MAX_TOP_LOGPROBS
from runtime.errors import RequestError
from serve_app.api.access import allowed_models
from serve_app.api.chat_task import chat_task, with_budget
from serve_app.api.fields import Body, BodyReader, FirstError, Items, harmless
from serve_app.api.json_lines import JSON_LINES, json_line
from serve_app.api.openai import ROLES_BY_NAME, logprob_entry
from serve_app.api.output_forms import ollama_form
from serve_app.api.refusals import Refusal
from serve_app.api.reply import BEFORE_LINE, Reply, SingleReply
from serve_app.api.reply_reader import Call, Collected, ReplyReader
from serve_app.api.request_images import ImageReader, ImageTotal, UnreadImage
from serve_app.api.tenant import tenant_id
from serve_app.api.tool_choice import call_rule, openai_choice
from serve_app.api.tools import Tool, checked_arguments, declared, schema_fields, strict_names
from serve_app.config.keep_alive import keep_alive_s
from serve_app.config.options import OLLAMA_DEFAULTS, Options
from serve_app.gateway.allowed_models import AllowedModels
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import (
    ChatDelta,
    ChatTask,
    Conversation,
    Infill,
    PromptSource,
    RawText,
    Truncation,
)

NOTHING = RawText("")
DEFAULT_NUM_KEEP = 4  # as in Ollama
# Ollama's for models without one: the texts of the conversation alone.
DEFAULT_TEMPLATE = "{{ .Prompt }}"
Context = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FirstError()]


class ChatFunction(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Any = harmless()


class ChatCall(Body):
    id: str | None = None
    function: ChatFunction
    type: Any = harmless()


class ChatMessage(Body):
    role: str
    content: str = ""
    thinking: str | None = None
    images: Items[str] = Field(default_factory=list)
    tool_calls: Items[ChatCall] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None

    def image_bytes(self) -> int:
        return sum(map(len, self.images))


class _Generation(Body):
    """Fields common to /api/chat and /api/generate."""

    model: str = ""
    stream: bool = True
    options: dict[str, Any] = Field(default_factory=dict)
    keep_alive: Any = None
    think: bool | str | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    format: Any = None
    truncate: bool = True
    shift: bool = True


class ChatBody(_Generation):
    holds_images: ClassVar[bool] = True
    messages: Items[ChatMessage] = Field(default_factory=list)
    tools: Items[Tool] = Field(default_factory=list)
    tool_choice: Any = None  # not Ollama's; some of its clients send it, in OpenAI's form

    def image_bytes(self) -> int:
        return sum(message.image_bytes() for message in self.messages)


class GenerateBody(_Generation):
    holds_images: ClassVar[bool] = True
    prompt: str = ""
    system: str = ""
    raw: bool = False
    suffix: str = ""
    template: str = ""
    context: Context = Field(default_factory=list)
    images: Items[str] = Field(default_factory=list)
    width: Any = harmless()  # image generation, which no supported model does
    height: Any = harmless()
    steps: Any = harmless()

    def image_bytes(self) -> int:
        return sum(map(len, self.images))


@dataclass(frozen=True, slots=True)
class OllamaChat:
    """Answers /api/chat and /api/generate."""

    backend: ChatBackend
    images: ImageReader
    bodies: BodyReader

    async def chat(self, request: Request) -> Response:
        body = await self.bodies.read(ChatBody, request)
        choice = openai_choice(body.tool_choice)
        given = () if choice.names == () else body.tools
        tools = await self.bodies.convert(request, declared, given)
        calls = call_rule(
            tools,
            choice,
            strict=strict_names(body.tools),
            parallel=True,
            schemas=schema_fields([tool.function for tool in body.tools]),
        )
        encoder = NativeEncoder("message", tools)
        model = await self._served(body, allowed_models(request))
        if not body.messages:
            return self._loaded(model, body, encoder, tenant_id(request))
        unread = await self.bodies.convert(request, _unread_images, body.messages, self.images)
        options = self._options(model, body)
        task = dataclasses.replace(_task(request, model, options, body), calls=calls)
        messages = await self._messages(request, model, body.messages, unread)
        prompt = Conversation(
            messages,
            _thinking(body),
            tools=tools,
            default_template=DEFAULT_TEMPLATE,
            reply=_reply(messages),
        )
        return self._reply(task, body, with_budget(prompt, options), encoder)

    async def generate(self, request: Request) -> Response:
        encoder = NativeEncoder("response")
        body = await self.bodies.read(GenerateBody, request)
        model = await self._served(body, allowed_models(request))
        if body.raw and (body.template or body.system or body.context):
            raise RequestError("raw mode does not support template, system, or context")
        if body.suffix and (body.raw or body.context or body.images):
            raise RequestError("suffix does not support raw mode, context, or images")
        if not body.prompt and not body.images:
            return self._loaded(model, body, encoder, tenant_id(request))
        await self.bodies.convert(request, self._check_count, body.prompt, body.images)
        options = self._options(model, body)
        task = _task(request, model, options, body)
        prompt = await self._prompt(request, model, body)
        return self._reply(task, body, with_budget(prompt, options), encoder)

    def _check_count(self, text: str, images: list[str]) -> None:
        self.images.check_count(image_places(text, len(images)))

    async def _served(self, body: _Generation, allowed: AllowedModels) -> ServedModel:
        model = await self.backend.served(body.model, allowed)
        _thinking(body)
        if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}")
        return model

    def _loaded(
        self, model: ServedModel, body: _Generation, encoder: "NativeEncoder", tenant: str
    ) -> Response:
        """Handles a request without content, which loads or unloads the model."""
        keep_s = keep_alive_s(body.keep_alive)

        async def done() -> bytes:
            if keep_s == 0:
                await self.backend.unload(model)
                return encoder.empty(body.model, "unload")
            await self.backend.load(model, keep_s, tenant=tenant)
            return encoder.empty(body.model, "load")

        return SingleReply(done, encoder.refused)

    async def _messages(
        self,
        request: Request,
        model: ServedModel,
        messages: list[ChatMessage],
        unread: list[UnreadImage],
    ) -> tuple[Message, ...]:
        """`unread`: the images of all messages, in order."""
        images = await self.images.read(model, unread, tenant=tenant_id(request))
        return await self.bodies.convert(request, _converted, messages, images)

    async def _prompt(
        self, request: Request, model: ServedModel, body: GenerateBody
    ) -> PromptSource:
        unread = _unread("images", body.images)
        if body.raw:
            images = await self.images.read(model, unread, tenant=tenant_id(request))
            return RawText(body.prompt, tuple(images))
        if body.suffix:
            return Infill(body.prompt, body.suffix, body.template)
        system = [ChatMessage(role="system", content=body.system)] if body.system else []
        user = ChatMessage(role="user", content=body.prompt, images=body.images)
        messages = await self._messages(request, model, [*system, user], unread)
        thinking, context = _thinking(body), tuple(body.context)
        return Conversation(
            messages,
            thinking,
            context,
            template=body.template,
            default_template=DEFAULT_TEMPLATE,
        )

    def _options(self, model: ServedModel, body: _Generation) -> Options:
        return self.bodies.options(body.options).over(model.options.over(OLLAMA_DEFAULTS))

    def _reply(
        self, task: ChatTask, body: _Generation, prompt: PromptSource, encoder: "NativeEncoder"
    ) -> Reply:
        task = dataclasses.replace(task, prompt=prompt)
        encoder.model = body.model
        return Reply(self.backend.generate(task), encoder, stream=body.stream)


def _task(request: Request, model: ServedModel, options: Options, body: _Generation) -> ChatTask:
    """The task without its prompt. Everything that can be refused is checked before images are
    read."""
    logprobs = body.top_logprobs if body.logprobs else None
    form = ollama_form(body.format)
    return dataclasses.replace(
        chat_task(request, model, options, NOTHING, logprobs=logprobs, output=form),
        prompt_wanted=isinstance(body, GenerateBody) and not body.raw,
        keep_alive_s=keep_alive_s(body.keep_alive),
        truncation=_truncation(body, options.num_keep),
        shift_keep=_keep(options.num_keep) if body.shift else None,
    )


class NativeEncoder:
    """One response as JSON lines; `field` holds the text: "message" (chat) or "response"."""

    stream_type = JSON_LINES
    heartbeat = BEFORE_LINE

    def __init__(self, field: str, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.model = ""
        self._field = field
        self._begun_ns = time.monotonic_ns()
        self._tokens: list[int] = []
        self._reader = ReplyReader(tools)
        self._collected = Collected()

    def piece(self, delta: ChatDelta) -> bytes:
        self._tokens += delta.tokens
        parts = [part for event in self._reader.read(delta) if (part := self._part(event))]
        if not parts and delta.logprobs:
            parts = [Part()]
        lines = [self._line(part) | {"done": False} for part in parts]
        if lines and delta.logprobs:
            lines[0]["logprobs"] = [logprob_entry(entry) for entry in delta.logprobs]
        if delta.finish is not None:
            lines.append(self._line(Part()) | self._end(delta))
        return b"".join(json_line(line) for line in lines)

    def whole(self, delta: ChatDelta) -> bytes:
        self._tokens += delta.tokens
        collected = self._collected
        for event in self._reader.read(delta):
            collected.add(event)
        line = self._line(Part(collected.text, collected.thinking, tuple(collected.calls.items())))
        if delta.logprobs:
            line["logprobs"] = [logprob_entry(entry) for entry in delta.logprobs]
        return json_line(line | self._end(delta)).rstrip()

    def broken(self, refusal: Refusal) -> bytes:
        return json_line({"error": refusal.message})

    def refused(self, refusal: Refusal) -> bytes:
        return json_line({"error": refusal.message}).rstrip()

    def empty(self, model: str, done_reason: str) -> bytes:
        """The body of the reply to a request without content."""
        self.model = model
        line = self._line(Part()) | {"done": True, "done_reason": done_reason}
        return json_line(line).rstrip()

    def _part(self, event: Event) -> "Part | None":
        """The content of the line for an event; None if it needs no line. Calls are sent when they
        are complete."""
        call = self._collected.add(event)
        match event:
            case Text(text) | CallAborted(_, text):
                return Part(text)
            case Thinking(text):
                return Part(thinking=text)
            case CallEnd(index) if call is not None:
                return Part(calls=((index, call),))
        return None

    def _line(self, part: "Part") -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        reply: dict[str, Any] = {"model": self.model, "created_at": now}
        thinking = {"thinking": part.thinking} if part.thinking else {}
        if self._field != "message":
            return reply | {self._field: part.text} | thinking
        message: dict[str, Any] = {"role": "assistant", "content": part.text} | thinking
        if part.calls:
            message["tool_calls"] = [_called(index, call) for index, call in part.calls]
        return reply | {"message": message}

    def _end(self, delta: ChatDelta) -> dict[str, Any]:
        assert delta.finish is not None
        context = {"context": [*delta.prompt, *self._tokens]} if delta.prompt else {}
        return {
            "done": True,
            "done_reason": delta.finish.value,
            **context,
            **self._metrics(delta),
        }

    def _metrics(self, delta: ChatDelta) -> dict[str, int]:
        usage = delta.usage
        if usage is None:
            return {}
        metrics = {
            "total_duration": time.monotonic_ns() - self._begun_ns,
            "load_duration": usage.queue_ns,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": usage.prompt_ns,
            "eval_count": usage.completion_tokens,
            "eval_duration": usage.decode_ns,
        }
        return {name: value for name, value in metrics.items() if value}


@dataclass(frozen=True, slots=True)
class Part:
    """The content of one line; `calls` with their indices."""

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[int, Call], ...] = ()


def _called(index: int, call: Call) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": call.value()}
    return {"id": call.id, "function": function}


def _unread_images(messages: list[ChatMessage], images: ImageReader) -> list[UnreadImage]:
    """The images of all messages. Raises RequestError for too many."""
    images.check_count(sum(image_places(each.content, len(each.images)) for each in messages))
    unread: list[UnreadImage] = []
    for index, message in enumerate(messages):
        unread += _unread(f"messages[{index}].images", message.images)
    return unread


def _unread(place: str, images: list[str]) -> list[UnreadImage]:
    return [UnreadImage(f"{place}[{index}]", text) for index, text in enumerate(images)]


def _converted(messages: list[ChatMessage], images: list[ImagePart]) -> tuple[Message, ...]:
    """`images`: those of all messages, in order. Raises RequestError for calls with oversized
    arguments."""
    given = iter(images)
    found = [
        _message(f"messages[{index}]", each, [next(given) for _ in each.images])
        for index, each in enumerate(messages)
    ]
    ImageTotal().add(sum(len(part.data) for each in found for part in each.images))
    return tuple(found)


def _message(place: str, message: ChatMessage, images: list[ImagePart]) -> Message:
    content = with_images(message.content, images) if images else message.content
    calls = tuple(
        _call(f"{place}.tool_calls[{n}]", call) for n, call in enumerate(message.tool_calls)
    )
    role = message.role.lower()
    role = ROLES_BY_NAME.get(role, role)
    if role != "tool":
        return Message(role, content, message.thinking, calls)
    identity = message.tool_call_id
    return Message(role, content, tool_name=message.tool_name, tool_call_id=identity)


def _call(place: str, call: ChatCall) -> ToolCall:
    arguments = checked_arguments(f"{place}.function.arguments", call.function.arguments)
    return ToolCall(call.function.name, arguments, call.id)


def _reply(messages: Sequence[Message]) -> ReplyStart:
    """The answer continues a last message of the assistant, unless that calls tools."""
    last = messages[-1]
    continued = last.role == "assistant" and not last.tool_calls
    return ReplyStart.CONTINUED if continued else ReplyStart.NEW


def _thinking(body: _Generation) -> bool | str | None:
    if isinstance(body.think, str) and body.think not in ("high", "medium", "low", "max"):
        raise RequestError(
            f'invalid think value: "{body.think}" (must be "high", "medium", "low", "max", true, '
            "or false)"
        )
    return body.think


def _truncation(body: _Generation, keep: int | None) -> Truncation | None:
    """How a prompt that does not fit is truncated. None: it is refused; also if it has images or a
    suffix, where tokens cannot be removed."""
    if not body.truncate:
        return None
    if not isinstance(body, GenerateBody):
        return Truncation(turns=True)
    if body.images or body.suffix:
        return None
    return Truncation(keep=_keep(keep))


def _keep(keep: int | None) -> int:
    return DEFAULT_NUM_KEEP if keep is None else keep
