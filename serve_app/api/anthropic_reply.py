"""Replies and errors of Anthropic's protocol: content blocks, stream events, error bodies."""

import secrets
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from model_zoo.chat.formats.events import CallAborted, Event, Text, Thinking
from runtime.engine.request import FinishReason, Usage
from serve_app.api.anthropic_tools import member_name
from serve_app.api.json_lines import EVENTS, encoded
from serve_app.api.refusals import INVALID_VALUE, Refusal
from serve_app.api.reply_reader import Call, Collected, ReplyReader
from serve_app.messages.tasks import ChatDelta
from serve_app.telemetry.request_context import current_request, request_id

_ID_BYTES = 12
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_INVALID_REQUEST = frozenset({400, 405, 408, 415})
# Clients send thinking back only if it has a signature. Nothing is signed here.
_SIGNATURE = "unsigned"
# By these words, Claude Code removes an image from the conversation.
UNPROCESSABLE = "Could not process image"
# By these details of a refused `thread`, tool runners recognise that they must send the whole
# conversation in each request.
THREAD = "thread"
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
# A block's type -> the type of its deltas, and the field that holds its value in blocks and deltas.
_BLOCKS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageEncoder:
    """One message, streamed or whole. `reader` separates its parts. `max_tokens`: the limit of the
    request; None if it has none. Without `shows_thinking`, the blocks of thinking are empty.
    `toolsets`: the toolset of each function that represents a tool of one.

    A tool call is sent when it is complete: a block cannot be withdrawn, and a malformed call is
    text.
    """

    stream_type = EVENTS

    def __init__(
        self,
        model: str,
        reader: ReplyReader,
        stop_sequences: tuple[str, ...] = (),
        *,
        max_tokens: int | None = None,
        shows_thinking: bool = True,
        toolsets: Mapping[str, str] | None = None,
    ) -> None:
        self._toolsets = toolsets or {}
        self._stop_sequences = stop_sequences
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._id = f"msg_{secrets.token_hex(_ID_BYTES)}"
        self._model = model
        self._reader = reader
        self._collected = Collected()
        self._begun = False
        self._blocks = 0  # number of blocks that the stream has started
        self._open: str | None = None  # type of the block that the stream has not stopped

    @property
    def heartbeat(self) -> bytes:
        return _event({"type": "ping"})

    def piece(self, delta: ChatDelta) -> bytes:
        events = []
        if not self._begun:
            self._begun = True
            usage = _usage(delta.usage, answered=False)
            message = self._message([], delta.usage) | {"usage": usage}
            events.append({"type": "message_start", "message": message})
        for event in self._reader.read(delta):
            events += self._block_events(event)
        if delta.finish is not None:
            events += self._stop()
            ending = self._ending(delta)
            usage = _usage(delta.usage)
            events.append({"type": "message_delta", "delta": ending, "usage": usage})
            events.append({"type": "message_stop"})
        return b"".join(_event(event) for event in events)

    def whole(self, delta: ChatDelta) -> bytes:
        assert delta.finish is not None
        blocks: list[dict[str, Any]] = []
        for event in self._reader.read(delta):
            kind, value = self._part(event)
            if isinstance(value, Call):
                blocks.append(self._call_block(value, value.value()))
            elif kind is not None and blocks and blocks[-1]["type"] == kind:
                blocks[-1][_BLOCKS[kind][1]] += value
            elif kind is not None:
                blocks.append(_block(kind, value))
        return encoded(self._message(blocks, delta.usage) | self._ending(delta))

    def broken(self, refusal: Refusal) -> bytes:
        return _event(error_body(refusal))

    def refused(self, refusal: Refusal) -> bytes:
        return encoded(error_body(refusal))

    def _part(self, event: Event) -> tuple[str | None, Any]:
        """The type of the block that `event` adds to, and what it adds: a text or a whole call."""
        call = self._collected.add(event)
        match event:
            case Text(text) | CallAborted(_, text):
                return "text", text
            case Thinking(text):
                return "thinking", text if self._shows_thinking else ""
        return (None, None) if call is None else ("tool_use", call)

    def _block_events(self, event: Event) -> list[dict[str, Any]]:
        kind, value = self._part(event)
        if kind is None:
            return []
        if isinstance(value, Call):
            delta = {"type": "input_json_delta", "partial_json": value.arguments or "{}"}
            events = [*self._stop(), *self._start(self._call_block(value, {})), self._delta(delta)]
            return [*events, *self._stop()]
        events = [] if self._open == kind else [*self._stop(), *self._start(_block(kind, "", ""))]
        delta_type, field = _BLOCKS[kind]
        return [*events, self._delta({"type": delta_type, field: value})] if value else events

    def _call_block(self, call: Call, arguments: dict[str, Any]) -> dict[str, Any]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
        toolset = self._toolsets.get(call.name)
        if toolset is None:
            return block
        name = call.name.removeprefix(member_name(toolset, ""))
        return block | {"name": name, "toolset_name": toolset, "caller": {"type": "direct"}}

    def _start(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._open = block["type"]
        self._blocks += 1
        index = self._blocks - 1
        return [{"type": "content_block_start", "index": index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        events = [self._delta(signature)] if self._open == "thinking" else []
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._blocks - 1}]

    def _ending(self, delta: ChatDelta) -> dict[str, Any]:
        """The end of the message. Only stop sequences of the request are reported as such, not
        those of the model's configuration."""
        if delta.matched in self._stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.matched}
        reason = "tool_use" if self._collected.calls else "end_turn"
        if delta.finish is FinishReason.LENGTH:
            most, usage = self._max_tokens, delta.usage
            full = usage is not None and most is not None and usage.completion_tokens < most
            reason = "model_context_window_exceeded" if full else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, blocks: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request has the header that all of Anthropic's clients send; it tells the protocols
    apart where they have the same path."""
    return "anthropic-version" in Headers(scope=scope)


def error_body(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status in _INVALID_REQUEST else "api_error"
    kind = _ERROR_TYPES.get(refusal.status, kind)
    message = refusal.compatible_message
    if refusal.code == INVALID_VALUE:
        message = f"{UNPROCESSABLE}: {message}"
    error: dict[str, Any] = {"type": kind, "message": message}
    if refusal.field == THREAD:
        error["details"] = _NO_THREADS
    context = current_request.get()
    id = request_id(None) if context is None else context.id
    return {"type": "error", "error": error, "request_id": id}


def _block(kind: str, text: str, signature: str = _SIGNATURE) -> dict[str, Any]:
    signed = {"signature": signature} if kind == "thinking" else {}
    return {"type": kind, _BLOCKS[kind][1]: text, **signed}


def _usage(usage: Usage | None, *, answered: bool = True) -> dict[str, Any]:
    """Token counts; `input_tokens` excludes cached tokens. Without `answered`, only the prompt
    counts."""
    prompt = cached = completion = thinking = 0
    if usage is not None:
        prompt, cached = usage.prompt_tokens, usage.cached_tokens
        if answered:
            completion, thinking = usage.completion_tokens, usage.thinking_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


def _event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: ".encode() + encoded(value) + b"\n\n"
