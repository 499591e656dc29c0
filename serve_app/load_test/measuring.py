"""Sends the requests of a load test, and measures their answers by the event loop's clock."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any

import httpx

from serve_app.load_test.workload import LoadRequest

PATH = "/v1/chat/completions"
_LONGEST_ERROR = 300
_LARGEST_ERROR_BODY = 64 * 2**10
UNFINISHED = "unfinished: the test was ended"
UNSENT = "not sent: the test was ended"


@dataclass(slots=True)
class Sample:
    """One request; times in seconds, `started_s` since the beginning of the test.

    `first_s`: to the first token, None without one. `gaps_s`: between parts of the answer, most of
    which are one token. `latency_s`: to the end. `error`: None for a complete answer. `due_s`: when
    it was to start, if there was a schedule; the other times are counted from `started_s`.
    """

    started_s: float
    first_s: float | None = None
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    answer_tokens: int = 0
    error: str | None = None
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent: at most `concurrency` at a time (None: no limit).

    `starts`: when they are due, in seconds since the beginning of the test. One that is due while
    too many run is sent late, and does not delay the next ones. None: each is sent as soon as fewer
    than `concurrency` run. Requests that still run or wait after `max_s` are cancelled.
    """

    concurrency: int | None
    starts: Iterator[float] | None
    max_s: float


class LoadClient:
    """Sends conversations to one model of a server with OpenAI's protocol."""

    def __init__(self, client: httpx.AsyncClient, model: str, *, ignore_eos: bool) -> None:
        self._client = client
        self._fixed: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
        }

    async def measure(self, request: LoadRequest, begun_s: float) -> Sample:
        """Measure one answer. Errors, and the cancellation of the task, are recorded in the
        sample."""
        now = asyncio.get_running_loop().time
        start = now()
        sample = Sample(start - begun_s)
        try:
            await self._read(request, sample, start)
        except asyncio.CancelledError:
            sample.error = UNFINISHED
        except (httpx.HTTPError, _RefusedError) as error:
            sample.error = str(error)[:_LONGEST_ERROR] or type(error).__name__
        except (ValueError, TypeError, AttributeError):
            sample.error = "the stream is not that of a chat completion"
        sample.latency_s = now() - start
        return sample

    async def _read(self, request: LoadRequest, sample: Sample, start: float) -> None:
        now = asyncio.get_running_loop().time
        body = {**self._fixed, "messages": request.messages, "max_tokens": request.max_tokens}
        last, parts = start, 0
        async with self._client.stream("POST", PATH, json=body) as response:
            if not response.is_success:
                raise _RefusedError(await _reason(response))
            async for document in _documents(response):
                if _has_text(document):
                    arrived = now()
                    if sample.first_s is None:
                        sample.first_s = arrived - start
                    else:
                        sample.gaps_s.append(arrived - last)
                    last, parts = arrived, parts + 1
                    sample.answer_tokens = parts  # until the server states them
                if isinstance(usage := document.get("usage"), dict):
                    sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
                    sample.answer_tokens = int(usage.get("completion_tokens") or 0)


class _RefusedError(Exception):
    """The server answered with an error."""


async def run_load(
    client: LoadClient,
    requests: Iterator[LoadRequest],
    count: int,
    load: Load,
    ended: Callable[[Sample], None],
) -> list[Sample]:
    """The samples of `count` requests in the order of their starts, or of the schedule; fewer if
    the time is up or this task is cancelled, as by Ctrl-C. `ended` is called with each sample at
    its end."""
    now = asyncio.get_running_loop().time
    begun_s = now()
    places = asyncio.Semaphore(load.concurrency or count)
    running: list[asyncio.Task[Sample]] = []

    async def send(request: LoadRequest, due_s: float | None) -> Sample:
        """Has a place already if it is due at no certain time."""
        try:
            if due_s is not None:
                await places.acquire()
        except asyncio.CancelledError:
            sample = Sample(now() - begun_s, error=UNSENT)
        else:
            sample = await client.measure(request, begun_s)
            places.release()
        sample.due_s = due_s
        ended(sample)
        return sample

    with suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(load.max_s):
            schedule = repeat(None) if load.starts is None else load.starts
            for request, due_s in islice(zip(requests, schedule, strict=False), count):
                if due_s is None:
                    await places.acquire()
                else:  # at its time, however late the last one was
                    await asyncio.sleep(max(0.0, begun_s + due_s - now()))
                running.append(asyncio.create_task(send(request, due_s)))
            await asyncio.wait(running)
    for task in running:
        task.cancel()
    results = await asyncio.gather(*running, return_exceptions=True)
    return [each for each in results if isinstance(each, Sample)]


async def _documents(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream. Raises _RefusedError for an error among them, and without an end."""
    complete = False
    async for line in _lines(response):  # to its end, so that the connection is used again
        data = line.removeprefix(b"data:").strip()
        complete = complete or data == b"[DONE]"
        if complete or not line.startswith(b"data:") or not data:
            continue
        document = json.loads(data)
        if (error := document.get("error")) is not None:
            raise _RefusedError(_message(error))
        yield document
    if not complete:
        raise _RefusedError("the stream ended early")


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of events. Those of httpx would also end at characters inside of JSON strings, such
    as U+2028."""
    begun = b""
    async for part in response.aiter_bytes():
        *lines, begun = (begun + part).split(b"\n")
        for line in lines:
            yield line
    yield begun


def _has_text(document: dict[str, Any]) -> bool:
    for choice in document.get("choices") or ():
        delta = choice.get("delta") or {}
        if any(delta.get(k) for k in ("content", "reasoning_content", "reasoning", "tool_calls")):
            return True
    return False


async def _reason(response: httpx.Response) -> str:
    """The status and message of an error."""
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _LARGEST_ERROR_BODY:
            break
    try:
        message = _message(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace").strip()
    return f"status {response.status_code}: {message}"


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
