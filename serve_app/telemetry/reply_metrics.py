"""Metrics of the answer to one task, from the client's point of view."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.engine.request import Usage
from runtime.errors import ModelNotFoundError, RequestError
from serve_app.messages.tasks import ChatDelta, ChatTask, Task
from serve_app.telemetry import metrics
from serve_app.telemetry.meter import Meter
from serve_app.telemetry.request_context import RequestContext, current_request


class ReplyRecord:
    """The deltas of one answer so far. Times by `time.monotonic`."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self.usage: Usage | None = None
        self.first: float | None = None  # time of the first tokens
        self.last = 0.0
        self.longest_gap = 0.0
        self.tokens = 0

    def note(self, delta: ChatDelta) -> None:
        if delta.usage is not None:
            self.usage = delta.usage
        if delta.finish is not None:
            self.finish = delta.finish.value
        if not delta.tokens:
            return
        now = time.monotonic()
        if self.first is None:
            self.first = now
        else:
            self.longest_gap = max(self.longest_gap, now - self.last)
        self.last = now
        self.tokens += len(delta.tokens)


@contextmanager
def recorded(meter: Meter, task: Task) -> Iterator[ReplyRecord]:
    """Records the answer when the context ends, for any reason."""
    context = current_request.get() or RequestContext("")
    record = ReplyRecord()
    outcome = "error"
    try:
        yield record
        outcome = record.finish or "cancelled"
    except (GeneratorExit, asyncio.CancelledError):
        outcome = record.finish or "cancelled"
        raise
    except (RequestError, ModelNotFoundError):
        outcome = "refused"
        raise
    finally:
        meter.add(metrics.REPLIES, 1, task.model, context.key, outcome)
        _record_tokens(meter, task.model, context.key, record)
        if isinstance(task, ChatTask):
            _record_times(meter, task.model, context, record)


def _record_tokens(meter: Meter, model: str, key: str, record: ReplyRecord) -> None:
    usage = record.usage
    if usage is not None:
        meter.add(metrics.PROMPT_TOKENS, usage.prompt_tokens, model, key)
        meter.add(metrics.CACHED_TOKENS, usage.cached_tokens, model, key)
        meter.observe(metrics.QUEUE_SECONDS, usage.queue_ns / 1e9, model)
    completion = 0 if usage is None else usage.completion_tokens
    meter.add(metrics.COMPLETION_TOKENS, max(record.tokens, completion), model, key)


def _record_times(meter: Meter, model: str, context: RequestContext, record: ReplyRecord) -> None:
    if record.first is None:
        return
    waited = record.first - context.arrived
    meter.observe(metrics.FIRST_TOKEN_SECONDS, waited, model, context.key)
    if record.tokens > 1:
        mean = (record.last - record.first) / (record.tokens - 1)
        meter.observe(metrics.BETWEEN_TOKENS_SECONDS, mean, model, context.key)
        meter.observe(metrics.LONGEST_GAP_SECONDS, record.longest_gap, model)
