"""The reply of OpenAI's /v1/responses: output items and stream events."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from model_zoo.chat.formats.events import CallAborted, Event, Text, Thinking
from runtime.engine.request import FinishReason, Usage
from serve_app.api.json_lines import on_one_line
from serve_app.api.offered_tools import call_item
from serve_app.api.openai import COMMENT, StreamEncoder, logprob_entry
from serve_app.api.refusals import CONTEXT_EXCEEDED, Refusal
from serve_app.api.reply_reader import Call, Collected, ReplyReader
from serve_app.api.responses_calls import StreamEvent
from serve_app.api.responses_input import item_id
from serve_app.api.responses_parts import Item
from serve_app.api.responses_tools import PlacedTool
from serve_app.messages.tasks import ChatDelta, TokenLogprob


class ResponseEncoder(StreamEncoder):
    """One response, streamed or whole. `facts`: fields of the response object that do not depend on
    the reply, such as its id. `reader` separates the parts of the reply. `tools`: those that the
    model may call, by the names of their functions.

    `final`: the response object after the end of the reply.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        reader: ReplyReader,
        tools: Mapping[str, PlacedTool],
    ) -> None:
        self.final: dict[str, Any] | None = None
        self._facts = facts
        self._reader = reader
        summarised = facts["reasoning"]["summary"] is not None
        self._output = Output(facts["id"], tools, summarised=summarised)
        self._created_at = int(time.time())
        self._sent = 0  # number of events

    @property
    def heartbeat(self) -> bytes:
        """An event, because Codex gives up a stream in which there is none for five minutes."""
        if self.final is not None:  # its event has been encoded, and no other may follow
            return COMMENT
        begun = self._begun()
        again = {"type": "response.in_progress", "response": self._response("in_progress")}
        return self._encoded(begun or [again])

    def piece(self, delta: ChatDelta) -> bytes:
        events = self._begun() + self._read(delta)
        if self.final is not None:
            events.append({"type": f"response.{self.final['status']}", "response": self.final})
        return self._encoded(events)

    def whole(self, delta: ChatDelta) -> bytes:
        self._read(delta)
        assert self.final is not None
        return msgspec.json.encode(self.final)

    def broken(self, refusal: Refusal) -> bytes:
        code = "rate_limit_exceeded" if refusal.status == 429 else refusal.code or "server_error"
        error = {"code": code, "message": refusal.compatible_message}
        events = self._begun() + self._output.close("incomplete")
        if code == CONTEXT_EXCEEDED:
            # As from OpenAI: the official client raises an exception for an event with a field
            # `error`, and LangChain recognises the words.
            error["message"] += "; it exceeds the context window"
            events.append({"type": "error", **error, "param": "input", "error": error})
        response = self._response("failed") | {"error": error}
        return self._encoded([*events, {"type": "response.failed", "response": response}])

    def _begun(self) -> list[StreamEvent]:
        """The first events, unless they have been sent."""
        if self._sent:
            return []
        begun = {"response": self._response("in_progress")}
        return [{"type": f"response.{name}", **begun} for name in ("created", "in_progress")]

    def _read(self, delta: ChatDelta) -> list[StreamEvent]:
        events = self._output.add(self._reader.read(delta), delta.logprobs)
        if delta.finish is None:
            return events
        incomplete = delta.finish is FinishReason.LENGTH
        status = "incomplete" if incomplete else "completed"
        events += self._output.close(status)
        self.final = self._response(status) | {"usage": _usage(delta.usage)}
        if incomplete:
            self.final["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.final["completed_at"] = int(time.time())
        return events

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._facts,
            "created_at": self._created_at,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output.items),
            "usage": None,
        }

    def _encoded(self, events: list[StreamEvent]) -> bytes:
        pieces = []
        for event in events:
            data = on_one_line(msgspec.json.encode(event | {"sequence_number": self._sent}))
            pieces.append(f"event: {event['type']}\ndata: ".encode() + data + b"\n\n")
            self._sent += 1
        return b"".join(pieces)


class Output:
    """The output items of the response `id`, and the events that report them.

    A tool call is reported when it is complete: an item cannot be withdrawn, and a malformed call
    is text. `summarised`: the thinking is reported as its summary, instead of as its text.
    """

    def __init__(self, id: str, tools: Mapping[str, PlacedTool], *, summarised: bool) -> None:
        self.items: list[Item] = []
        self._id = id
        self._tools = tools
        self._summarised = summarised
        self._collected = Collected()
        self._open: _TextItem | None = None
        self._logprobs = _Logprobs()

    def add(self, parts: list[Event], logprobs: tuple[TokenLogprob, ...]) -> list[StreamEvent]:
        """Adds parts of the reply. `logprobs`: those of the tokens since the last call."""
        events = []
        self._logprobs.entries += logprobs
        for part in parts:
            call = self._collected.add(part)
            match part:
                case Text(text) | CallAborted(_, text):
                    events += self._text("message", text, self._logprobs.take(text))
                case Thinking(text):
                    self._logprobs.take(text)
                    kind = "summary" if self._summarised else "reasoning"
                    events += self._text(kind, text, [])
            if call is not None:
                events += self.close("completed") + self._call(call)
        return events

    def close(self, status: str) -> list[StreamEvent]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        events, self._open = self._open.end(status), None
        return events

    def _text(self, kind: str, text: str, logprobs: list[TokenLogprob]) -> list[StreamEvent]:
        events = []
        if self._open is None or self._open.kind != kind:
            events += self.close("completed")
            self._open = _TextItem(kind, self._id, len(self.items))
            self.items.append(self._open.item)
            events += self._open.begin()
        return [*events, self._open.add(text, logprobs)]

    def _call(self, call: Call) -> list[StreamEvent]:
        index = len(self.items)
        kind, fields = call_item(self._tools.get(call.name), call)
        item = {"id": item_id(kind.prefix, self._id, index), **fields}
        self.items.append(item)
        place = {"output_index": index}
        begun = item | kind.begun(item) | {"status": "in_progress"}
        return [
            {"type": "response.output_item.added", **place, "item": begun},
            *(event | place for event in kind.events(item)),
            {"type": "response.output_item.done", **place, "item": item},
        ]


class _Logprobs:
    """The log-probabilities of tokens whose text has not been reported yet, and of markup."""

    def __init__(self) -> None:
        self.entries: list[TokenLogprob] = []

    def take(self, text: str) -> list[TokenLogprob]:
        """The log-probabilities of the tokens of the next `text`. The last token may extend beyond
        the text."""
        wanted, raws = text.encode(), [entry.drawn.raw for entry in self.entries]
        begin = b"".join(raws).find(wanted)
        if begin < 0 or not wanted:
            return []
        ends = list(accumulate(map(len, raws)))
        first, last = bisect_right(ends, begin), bisect_left(ends, begin + len(wanted))
        taken, self.entries = self.entries[first : last + 1], self.entries[last + 1 :]
        return taken


@dataclass(frozen=True, slots=True)
class _Part:
    """The names of a part with text: its type, its field in the item, and the prefixes of events
    about its text and about the part."""

    type: str
    field: str
    text: str
    part: str
    index: str


_PARTS = {
    "message": _Part("output_text", "content", "output_text", "content_part", "content_index"),
    "reasoning": _Part(
        "reasoning_text", "content", "reasoning_text", "content_part", "content_index"
    ),
    "summary": _Part(
        "summary_text",
        "summary",
        "reasoning_summary_text",
        "reasoning_summary_part",
        "summary_index",
    ),
}


class _TextItem:
    """An item with one text: a message, reasoning, or reasoning with only a summary."""

    def __init__(self, kind: str, response_id: str, index: int) -> None:
        self.kind = kind
        self._index = index
        self._texts: list[str] = []
        self._message = kind == "message"
        self._logprobs: list[dict[str, Any]] = []
        self._names = _PARTS[kind]
        if self._message:
            fields: Item = {"id": item_id("msg", response_id, index), "role": "assistant"}
        else:
            fields = {"id": item_id("rs", response_id, index), "summary": []}
        type = "message" if self._message else "reasoning"
        self.item: Item = {**fields, "type": type, "status": "in_progress", "content": []}

    def begin(self) -> list[StreamEvent]:
        added = {"output_index": self._index, "item": dict(self.item)}
        return [
            {"type": "response.output_item.added", **added},
            self._event(f"{self._names.part}.added", part=self._part()),
        ]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> StreamEvent:
        self._texts.append(text)
        entries = [logprob_entry(each) for each in logprobs]
        self._logprobs += entries
        return self._event(f"{self._names.text}.delta", delta=text, **self._with_logprobs(entries))

    def end(self, status: str) -> list[StreamEvent]:
        part = self._part()
        self.item |= {"status": status, self._names.field: [part]}
        logprobs = self._with_logprobs(self._logprobs)
        return [
            self._event(f"{self._names.text}.done", text=part["text"], **logprobs),
            self._event(f"{self._names.part}.done", part=part),
            {
                "type": "response.output_item.done",
                "output_index": self._index,
                "item": dict(self.item),
            },
        ]

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._names.type, "text": "".join(self._texts)}
        if self._message:
            part |= {"annotations": [], **self._with_logprobs(self._logprobs)}
        return part

    def _with_logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The field `logprobs`, which messages must have even if it is empty."""
        return {"logprobs": list(entries)} if self._message else {}

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        place = {"item_id": self.item["id"], "output_index": self._index, self._names.index: 0}
        return {"type": f"response.{kind}", **place, **fields}


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
