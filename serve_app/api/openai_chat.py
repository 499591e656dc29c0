"""The OpenAI-compatible protocol: /v1/chat/completions."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from model_zoo.chat.messages import ImagePart, Message
from runtime.errors import RequestError
from serve_app.api.access import allowed_models
from serve_app.api.fields import Body, BodyReader, Items, harmless, unserved
from serve_app.api.openai import (
    Accounting,
    Common,
    StreamEncoder,
    configured,
    event,
    task_for,
    token_entry,
)
from serve_app.api.reply import Reply
from serve_app.api.request_images import ImageReader, Unread, from_url
from serve_app.api.tenant import tenant_id
from serve_app.config.options import OPENAI_BOUNDS, number
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.tasks import ChatDelta, Conversation, TokenLogprob

# "developer" is the newer name of the same role.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


# Variables that the server itself sets, and what would replace the template.
_RESERVED = frozenset(
    {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"}
    | {"continue_final_message", "chat_template", "tokenize"}
)
MAX_NAME_CHARACTERS = 256
MAX_VARIABLES_BYTES = 64 * 1024
MAX_VARIABLES_DEPTH = 32
_TOO_DEEP = f'field "chat_template_kwargs" is nested more than {MAX_VARIABLES_DEPTH} deep'


class ChatMessage(Body):
    role: str
    content: str | Items[Any] = ""
    name: str | None = None
    refusal: Any = harmless()
    annotations: Any = harmless()
    audio: Any = unserved()
    reasoning: Any = unserved()
    reasoning_content: Any = unserved()
    function_call: Any = unserved()
    tool_calls: Any = unserved()
    tool_call_id: Any = unserved()

    @property
    def images(self) -> list[Any]:
        """What the parts with images have as their URL."""
        if isinstance(self.content, str):
            return []
        images = (part.get("image_url") for part in self.content if _is_image(part))
        return [image.get("url") if isinstance(image, dict) else image for image in images]

    def image_bytes(self) -> int:
        return sum(len(url) for url in self.images if isinstance(url, str))


class ChatBody(Common):
    holds_images: ClassVar[bool] = True
    messages: Items[ChatMessage]
    max_completion_tokens: Any = None
    logprobs: bool = False
    top_logprobs: Any = None
    reasoning_effort: Any = unserved("none")
    reasoning: Any = unserved({"effort": "none"})
    tools: Any = unserved()
    tool_choice: Any = unserved("none", "auto")
    functions: Any = unserved()
    function_call: Any = unserved("none", "auto")
    modalities: Any = unserved(["text"])
    audio: Any = unserved()
    web_search_options: Any = unserved()
    moderation: Any = unserved()
    parallel_tool_calls: Any = harmless()
    prediction: Any = harmless()
    verbosity: Any = harmless()  # no model here is made for it
    # Of vLLM:
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: Any = unserved()
    chat_template: Any = unserved()
    add_generation_prompt: Any = unserved(True)
    continue_final_message: Any = unserved(False)
    add_special_tokens: Any = unserved(False)
    mm_processor_kwargs: Any = unserved()
    thinking_token_budget: Any = unserved()
    include_reasoning: Any = harmless()

    def image_bytes(self) -> int:
        return sum(message.image_bytes() for message in self.messages)


class OpenAIChat:
    """Answers /v1/chat/completions."""

    def __init__(self, backend: ChatBackend, images: ImageReader, bodies: BodyReader) -> None:
        self._backend = backend
        self._images = images
        self._bodies = bodies

    async def complete(self, request: Request) -> Response:
        body = await self._bodies.read(ChatBody, request)
        model = await self._backend.served(body.model, allowed_models(request))
        if not body.messages:
            raise RequestError("[] is too short - 'messages'")
        self._images.check_count(sum(len(each.images) for each in body.messages))
        drafts = [_draft(index, each) for index, each in enumerate(body.messages)]
        options, logprobs = configured(body, model, _max_tokens(body)), _logprobs(body)
        variables = _variables(body.chat_template_kwargs)
        unread = [image for draft in drafts for image in draft.images]
        tenant = tenant_id(request)
        images = iter(await self._images.read(model, unread, tenant=tenant))
        messages = tuple(draft.message(images) for draft in drafts)
        prompt = Conversation(messages, _thinking(body), variables=variables)
        task = task_for(model, options, prompt, logprobs=logprobs, tenant=tenant)
        encoder = ChatEncoder(body.model, task.id, usage_wanted=body.usage_wanted)
        return Reply(self._backend.generate(task), encoder, stream=body.stream)


@dataclass(frozen=True, slots=True)
class Draft:
    """A message whose images are yet to be read."""

    role: str
    content: str | tuple[str | Unread, ...]
    name: str | None = None

    @property
    def images(self) -> list[Unread]:
        parts = () if isinstance(self.content, str) else self.content
        return [part for part in parts if isinstance(part, Unread)]

    def message(self, images: Iterator[ImagePart]) -> Message:
        """Takes as many of `images` as it has."""
        if isinstance(self.content, str):
            return Message(self.role, self.content, name=self.name)
        parts = (part if isinstance(part, str) else next(images) for part in self.content)
        return Message(self.role, tuple(parts), name=self.name)


class ChatEncoder(StreamEncoder):
    """One chat answer, streamed or whole."""

    def __init__(self, model: str, task_id: str, *, usage_wanted: bool) -> None:
        self._accounting = Accounting(model, f"chatcmpl-{task_id}")
        self._usage_wanted = usage_wanted
        self._begun = False

    def piece(self, delta: ChatDelta) -> bytes:
        events = []
        if delta.text or delta.logprobs or not self._begun:
            role = {} if self._begun else {"role": "assistant"}
            self._begun = True
            events.append(self._chunk(role | {"content": delta.text}, None, delta.logprobs))
        if delta.finish is not None:
            events.append(self._chunk({}, delta.finish.value))
            if self._usage_wanted:
                events.append(event(self._frame([]) | self._accounting.usage(delta)))
            events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def whole(self, delta: ChatDelta) -> bytes:
        assert delta.finish is not None
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": delta.text},
            "finish_reason": delta.finish.value,
            "logprobs": _content(delta.logprobs),
        }
        return self._accounting.reply("chat.completion", [choice], delta)

    def _chunk(
        self, said: dict[str, str], finish: str | None, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": said, "finish_reason": finish}
        if logprobs:
            choice["logprobs"] = _content(logprobs)
        return event(self._frame([choice]))

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._accounting.frame("chat.completion.chunk") | {"choices": choices}


def _draft(index: int, message: ChatMessage) -> Draft:
    role = message.role.lower()
    if role in ("tool", "function"):
        raise RequestError(f'field "messages[{index}].role" is "{role}", which is not served yet')
    if message.name is not None and len(message.name) > MAX_NAME_CHARACTERS:
        raise RequestError(
            f'field "messages[{index}].name" has {len(message.name):,} characters; at most '
            f"{MAX_NAME_CHARACTERS} are taken"
        )
    content = _content_of(f"messages[{index}].content", message.content)
    return Draft(_ROLES.get(role, role), content, message.name)


def _content_of(place: str, content: str | list[Any]) -> str | tuple[str | Unread, ...]:
    """Texts side by side are set apart by a blank line, as messages of their own would be."""
    if isinstance(content, str):
        return content
    parts: list[str | Unread] = []
    read = (_part(f"{place}[{index}]", part) for index, part in enumerate(content))
    for kind, group in groupby(read, key=type):
        if kind is str:
            parts.append("\n\n".join(map(str, group)))
        else:
            parts += group
    has_images = any(isinstance(part, Unread) for part in parts)
    return tuple(parts) if has_images else "".join(map(str, parts))


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _part(place: str, part: Any) -> str | Unread:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f'invalid message format: field "{place}" must be an object with a type')
    if part["type"] == "image_url":
        return _image(f"{place}.image_url", part.get("image_url"))
    if part["type"] != "text":
        raise RequestError(f'field "{place}" is of type "{part["type"]}", which is not served yet')
    if not isinstance(part.get("text"), str):
        raise RequestError(f'field "{place}.text" must be a string')
    return part["text"]


def _image(place: str, image: Any) -> Unread:
    """`detail` beside the URL is left alone: the model decides at which size it sees."""
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise RequestError(f'invalid image input: field "{place}" must have a URL, a string')
    return from_url(place, url)


def _max_tokens(body: ChatBody) -> int | None:
    """The newer name wins; both are checked."""
    values = [
        int(number(name, value, OPENAI_BOUNDS[name]))
        for name in ("max_completion_tokens", "max_tokens")
        if (value := getattr(body, name)) is not None
    ]
    return values[0] if values else None


def _thinking(body: ChatBody) -> bool | None:
    return False if body.reasoning_effort == "none" or body.reasoning else None


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    """Of the chat template. RequestError for reserved ones, and for more than is taken."""
    reserved = sorted(_RESERVED & given.keys())
    if reserved:
        raise RequestError(f'field "chat_template_kwargs.{reserved[0]}" cannot be set by a request')
    try:
        size = len(msgspec.json.encode(given))
    except RecursionError:
        raise RequestError(_TOO_DEEP) from None
    if size > MAX_VARIABLES_BYTES:
        raise RequestError(
            f'field "chat_template_kwargs" has {size:,} bytes as JSON; at most '
            f"{MAX_VARIABLES_BYTES:,} are taken"
        )
    _check_value(given, depth=0)
    return given


def _check_value(value: Any, *, depth: int) -> None:
    """What crosses processes as it is: no deep nesting, no integer of more than 64 bits."""
    if depth > MAX_VARIABLES_DEPTH:
        raise RequestError(_TOO_DEEP)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RequestError('field "chat_template_kwargs" has a number that needs more than 64 bits')
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _check_value(item, depth=depth + 1)


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is None:
        return 0 if body.logprobs else None
    top = int(number("top_logprobs", body.top_logprobs, OPENAI_BOUNDS["top_logprobs"]))
    if top and not body.logprobs:
        raise RequestError('field "top_logprobs" needs "logprobs": true')
    return top if body.logprobs else None


def _content(logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
    if not logprobs:
        return None
    entries = [
        token_entry(entry.drawn) | {"top_logprobs": [token_entry(each) for each in entry.top]}
        for entry in logprobs
    ]
    return {"content": entries, "refusal": None}
