"""A deployment for tests whose replicas can be made slow, stopped inside answers, and killed."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.engine.engine import Engine
from serve_app.deployments.model_deployments import ModelDeployment
from serve_app.messages.tasks import ChatDelta, ChatTask, RawText, Task
from serve_app.replica.replica import ModelReplica

CRASH_PROMPT = "crash "


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """`held`: answers that are stopped; `resumed`: answers taken over from other replicas."""

    pid: int
    held: int
    resumed: int


class FragileDeployment(ModelDeployment):
    """Replicas kill themselves on the raw prompt "crash FILE" and append their process id to FILE.

    Steps can be slowed down, and answers that start here can be stopped after some deltas, so that
    a test can kill a replica in the middle of an answer.
    """

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]
        self._resumed, self._step_s = 0, 0.0
        self._hold_after: int | None = None
        self._held, self._released = 0, asyncio.Event()
        generate, step = ModelReplica.generate, Engine.step

        def slow(engine: Engine) -> bool:
            time.sleep(self._step_s)
            return step(engine)

        Engine.step = slow

        async def fragile(replica: ModelReplica, task: Task) -> AsyncGenerator[ChatDelta, None]:
            resume = task.resume if isinstance(task, ChatTask) else None
            resumed = bool(resume and resume.tokens)
            self._resumed += resumed
            sent = 0
            async with aclosing(generate(replica, task)) as deltas:
                async for delta in deltas:
                    _crash_at(task)
                    yield delta
                    sent += 1
                    if sent == self._hold_after and not resumed:
                        await self._hold()

        ModelReplica.generate = fragile
        await super().__init__(*args)

    async def pace(self, step_s: float) -> None:
        self._step_s = step_s

    async def hold_after(self, deltas: int | None) -> None:
        """Stop answers that start here after so many deltas; None continues stopped ones."""
        self._hold_after = deltas
        if deltas is None:
            self._released.set()
        else:
            self._released.clear()

    async def report(self) -> ReplicaReport:
        return ReplicaReport(os.getpid(), self._held, self._resumed)

    async def _hold(self) -> None:
        self._held += 1
        try:
            await self._released.wait()
        finally:
            self._held -= 1


def _crash_at(task: Task) -> None:
    prompt = task.prompt if isinstance(task, ChatTask) else None
    text = prompt.text if isinstance(prompt, RawText) else ""
    if text.startswith(CRASH_PROMPT):
        with Path(text.removeprefix(CRASH_PROMPT)).open("a") as deaths:
            deaths.write(f"{os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
