"""Answers to tasks: all deltas, or these merged."""

import asyncio
from contextlib import aclosing
from typing import Any

from runtime.engine.request import SamplingParams
from serve_app.messages.tasks import ChatDelta, ChatTask, RawText, Task, merge
from tests.patience import HANG_S

TASK = ChatTask("t1", "demo", RawText("hi"), SamplingParams(seed=7))


async def deltas_of(answering: Any, task: Task) -> list[ChatDelta]:
    """Of what has a method `generate`, such as a replica or a backend."""
    async with asyncio.timeout(HANG_S), aclosing(answering.generate(task)) as deltas:
        return [delta async for delta in deltas]


async def answer_of(answering: Any, task: Task = TASK) -> ChatDelta:
    return merge(await deltas_of(answering, task))
