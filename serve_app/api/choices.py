"""Several choices of one request: one task for each, with their deltas merged into one stream."""

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from runtime.engine.request import FinishReason, Usage
from runtime.errors import RequestError
from serve_app.config.options import SEED_LIMIT, Bounds, number
from serve_app.gateway.backend import ChatBackend
from serve_app.messages.tasks import ChatDelta, ChatTask, EchoedPrompt, PromptSource, merge

MAX_CHOICES = 16  # of one prompt
MAX_ANSWERS = 128  # of all prompts of a request
# Answers that a request generates at a time. The queues in front of the engine bound the places of
# a tenant; those for forms of replies leave it 32 (`FairGate`, `ReplyForms`).
MAX_STREAMS = 32


@dataclass(frozen=True, slots=True)
class BestOf:
    """Selects for each prompt the `keep` of its `candidates` with the highest mean log-probability
    per token; a candidate without tokens ranks last.

    `logprobs_wanted`: whether the client asked for log-probabilities.
    """

    keep: int
    candidates: int
    logprobs_wanted: bool

    def select(self, answers: Sequence[ChatDelta]) -> list[ChatDelta]:
        """The best answers of each prompt, best first. `answers`: all candidates, in order."""
        selected: list[ChatDelta] = []
        for begin in range(0, len(answers), self.candidates):
            candidates = answers[begin : begin + self.candidates]
            selected += sorted(candidates, key=_mean_logprob, reverse=True)[: self.keep]
        if self.logprobs_wanted:
            return selected
        return [_without_logprobs(answer) for answer in selected]


def choice_count(name: str, value: Any, *, prompts: int = 1) -> int:
    """The value of the field `name`, which multiplies the choices of a request; None means 1.

    Raises RequestError for values that are not integers, for more than MAX_CHOICES, and for more
    than MAX_ANSWERS in total.
    """
    count = 1 if value is None else int(number(name, value, Bounds(int, 1, MAX_CHOICES)))
    if prompts * count > MAX_ANSWERS:
        raise RequestError(
            f'field "prompt" with {prompts:,} prompts and field "{name}" with {count} make '
            f"{prompts * count:,} choices; a request may have at most {MAX_ANSWERS}"
        )
    return count


def choice_tasks(
    task: ChatTask, prompts: Sequence[PromptSource], per_prompt: int
) -> list[ChatTask]:
    """`per_prompt` tasks like `task` for each prompt. The seed of each is that of `task` plus its
    index, so the first choice is the answer to a request for one.
    """
    first, sampling = task.sampling.seed, task.sampling
    return [
        replace(
            task,
            id=uuid.uuid4().hex if index else task.id,
            prompt=prompts[index // per_prompt],
            sampling=replace(sampling, seed=(first + index) % SEED_LIMIT),
        )
        for index in range(len(prompts) * per_prompt)
    ]


def generate_choices(
    backend: ChatBackend, tasks: Sequence[ChatTask], per_prompt: int
) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of all tasks, each wrapped in `choices` of a delta of the whole request; deltas of
    a single task are unchanged. Further tasks than MAX_STREAMS begin when others end.

    The first failure ends the stream. Leaving it, for any reason, aborts all tasks.
    """
    if len(tasks) == 1:
        return backend.generate(tasks[0])
    return _merged([backend.generate(task) for task in tasks], per_prompt)


async def _merged(
    streams: Sequence[AsyncGenerator[ChatDelta, None]], per_prompt: int
) -> AsyncGenerator[ChatDelta, None]:
    # Bounded, so that the deltas of a client that reads slowly stay in the connections, which merge
    # and limit them.
    received: asyncio.Queue[tuple[int, ChatDelta] | Exception] = asyncio.Queue(len(streams))

    running = asyncio.Semaphore(MAX_STREAMS)

    async def receive(index: int, stream: AsyncGenerator[ChatDelta, None]) -> None:
        try:
            async with running, aclosing(stream) as deltas:
                async for delta in deltas:
                    await received.put((index, delta))
        except Exception as error:
            await received.put(error)

    receiving = [asyncio.create_task(receive(*each)) for each in enumerate(streams)]
    totals = _Totals(len(streams), per_prompt)
    try:
        while totals.unfinished:
            item = await received.get()
            if isinstance(item, Exception):
                raise item
            yield totals.add(*item)
    finally:
        for task in receiving:
            task.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)


class _Totals:
    """The token usage of all choices of a request so far."""

    def __init__(self, choices: int, per_prompt: int) -> None:
        self.unfinished = choices
        self._usages: list[Usage | None] = [None] * choices
        self._per_prompt = per_prompt

    def add(self, index: int, delta: ChatDelta) -> ChatDelta:
        """The delta of the request for a delta of one choice."""
        if delta.usage is not None:
            self._usages[index] = delta.usage
        if delta.finish is not None:
            self.unfinished -= 1
        return ChatDelta(
            tokens=delta.tokens,
            finish=None if self.unfinished else FinishReason.STOP,
            usage=self._usage() if delta.usage is not None else None,
            choices=((index, delta),),
        )

    def _usage(self) -> Usage:
        """The usage, with each prompt counted once. Its cached tokens are those of the choice with
        the fewest, because the others may have found pages that this choice computed."""
        prompts = [
            [usage for usage in self._usages[begin : begin + self._per_prompt] if usage is not None]
            for begin in range(0, len(self._usages), self._per_prompt)
        ]
        known = [usage for usages in prompts for usage in usages]
        return Usage(
            prompt_tokens=sum(usages[0].prompt_tokens for usages in prompts if usages),
            cached_tokens=sum(min(u.cached_tokens for u in usages) for usages in prompts if usages),
            completion_tokens=sum(usage.completion_tokens for usage in known),
            queue_ns=max(usage.queue_ns for usage in known),
            prompt_ns=max(usage.prompt_ns for usage in known),
            decode_ns=max(usage.decode_ns for usage in known),
            thinking_tokens=sum(usage.thinking_tokens for usage in known),
        )


def whole_choices(delta: ChatDelta) -> list[ChatDelta]:
    """The complete answers in a merged delta of `generate_choices`, by index."""
    if not delta.choices:
        return [delta]
    parts: dict[int, list[ChatDelta]] = {}
    for index, part in delta.choices:
        parts.setdefault(index, []).append(part)
    return [merge(parts[index]) for index in sorted(parts)]


def _without_logprobs(answer: ChatDelta) -> ChatDelta:
    echo = None if answer.echo is None else EchoedPrompt(answer.echo.text)
    return replace(answer, logprobs=(), echo=echo)


def _mean_logprob(answer: ChatDelta) -> float:
    logprobs = [entry.drawn.logprob for entry in answer.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
