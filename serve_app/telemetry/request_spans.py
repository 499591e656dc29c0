"""The spans of a request: its tasks in the ingress, and its work in replicas and encoders.

Attributes follow OpenTelemetry's conventions for generative AI where those have names.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from runtime.engine.request import RequestOrigin, Usage
from serve_app.messages.tasks import ChatDelta, ChatTask, Conversation, EmbeddingTask, Task
from serve_app.telemetry.reply_metrics import ReplyRecord
from serve_app.telemetry.request_context import current_request
from serve_app.telemetry.spans import Attribute, SpanKind, Spans

Generate = Callable[[Task], AsyncGenerator[ChatDelta, None]]


@contextmanager
def task_span(spans: Spans | None, task: Task, record: ReplyRecord) -> Iterator[Task]:
    """The task with an origin whose `traceparent` is a span of the ingress over all attempts."""
    context = current_request.get()
    origin = RequestOrigin() if context is None else RequestOrigin(context.id, context.traceparent)
    task = replace(task, origin=origin)
    if spans is None:
        yield task
        return
    name = f"{_operation(task)} {task.model}"
    with spans.span(name, SpanKind.CLIENT, origin.traceparent) as span:
        span.set(**_request_attributes(task))
        try:
            yield replace(task, origin=replace(origin, traceparent=span.traceparent))
        finally:
            span.set(**_response_attributes(record))


def spanned_replies(spans: Spans | None, generate: Generate) -> Generate:
    """`generate` with a span for each task, and spans of its time in the queue, in prefill and in
    decode; without `spans`, `generate` itself."""
    if spans is None:
        return generate

    async def spanned(task: Task) -> AsyncGenerator[ChatDelta, None]:
        name = f"replica {task.model}"
        with spans.span(name, SpanKind.SERVER, task.origin.traceparent) as span:
            usage: Usage | None = None
            counted_ns, finished = 0, False
            origin = replace(task.origin, traceparent=span.traceparent)
            try:
                async with aclosing(generate(replace(task, origin=origin))) as deltas:
                    async for delta in deltas:
                        if delta.usage is not None:
                            usage, counted_ns = delta.usage, time.time_ns()
                        finished = delta.finish is not None
                        yield delta
            finally:
                if usage is not None and isinstance(task, ChatTask):
                    ended_ns = counted_ns if finished else time.time_ns()
                    _add_phases(spans, span.traceparent, usage, counted_ns, ended_ns)

    return spanned


def _add_phases(spans: Spans, parent: str, usage: Usage, counted_ns: int, ended_ns: int) -> None:
    """Adds spans of queue, prefill and decode from the engine's durations up to `counted_ns`. The
    usage of a cancelled answer is that of its first delta; its decoding ended later."""
    decode_ns = counted_ns - usage.decode_ns
    prefill_ns = decode_ns - usage.prompt_ns
    spans.past("queue", parent, prefill_ns - usage.queue_ns, prefill_ns)
    spans.past("prefill", parent, prefill_ns, decode_ns)
    spans.past("decode", parent, decode_ns, ended_ns)


def _operation(task: Task) -> str:
    match task:
        case ChatTask(prompt=Conversation()):
            return "chat"
        case ChatTask():
            return "text_completion"
        case EmbeddingTask():
            return "embeddings"
    return "tokenize"


def _request_attributes(task: Task) -> dict[str, Attribute | None]:
    attributes: dict[str, Attribute | None] = {
        "gen_ai__operation__name": _operation(task),
        "gen_ai__provider__name": "caravan",
        "gen_ai__request__model": task.model,
        "caravan__request__id": task.origin.id or None,
    }
    if isinstance(task, ChatTask):
        attributes["gen_ai__request__max_tokens"] = task.max_tokens
        attributes["gen_ai__request__temperature"] = task.sampling.temperature
    return attributes


def _response_attributes(record: ReplyRecord) -> dict[str, Attribute | None]:
    usage = record.usage
    # The usage of a cancelled answer is that of its first delta.
    completion = 0 if usage is None else usage.completion_tokens
    return {
        "gen_ai__response__finish_reasons": None if record.finish is None else (record.finish,),
        "gen_ai__usage__input_tokens": None if usage is None else usage.prompt_tokens,
        "gen_ai__usage__output_tokens": max(record.tokens, completion),
        "caravan__usage__cached_tokens": None if usage is None else usage.cached_tokens,
    }
