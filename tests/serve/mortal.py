"""The deployment of a model with a weakness, and with eyes on its replicas; for tests alone."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch

import serve_app.app
from runtime.engine.engine import Engine
from serve_app.gateway.tasks import ChatDelta, ChatTask, RawText, Task
from serve_app.replica.deployments import ModelDeployment
from serve_app.replica.replica import ModelReplica

POISON = "poison "


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen of a replica. `holding`: answers that it goes on with when it is told to;
    `continued`: answers that it got from others."""

    pid: int
    holding: int
    continued: int


class MortalDeployment(ModelDeployment):
    """Its replicas die of answering the raw prompt "poison FILE"; FILE gets their ids.

    Steps can be made to take their time, and answers that begin here to stop after some deltas, so
    that one can be met in the middle.
    """

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]
        self._continued, self._step_s = 0, 0.0
        self._hold_after: int | None = None
        self._holding, self._go_on = 0, asyncio.Event()
        generate, step = ModelReplica.generate, Engine.step

        def paced(engine: Engine) -> bool:
            time.sleep(self._step_s)
            return step(engine)

        Engine.step = paced

        async def mortal(replica: ModelReplica, task: Task) -> AsyncGenerator[ChatDelta, None]:
            begun = task.begun if isinstance(task, ChatTask) else None
            continued = bool(begun and begun.tokens)
            self._continued += continued
            told = 0
            async with aclosing(generate(replica, task)) as deltas:
                async for delta in deltas:
                    _die_of(task)
                    yield delta
                    told += 1
                    if told == self._hold_after and not continued:
                        await self._held()

        ModelReplica.generate = mortal
        await super().__init__(*args)

    async def pace(self, step_s: float) -> None:
        self._step_s = step_s

    async def hold_after(self, deltas: int | None) -> None:
        """Where answers stop from now on; with None they go on."""
        self._hold_after = deltas
        if deltas is None:
            self._go_on.set()
        else:
            self._go_on.clear()

    async def sight(self) -> Sight:
        return Sight(os.getpid(), self._holding, self._continued)

    async def _held(self) -> None:
        self._holding += 1
        try:
            await self._go_on.wait()
        finally:
            self._holding -= 1


@contextmanager
def mortal_replicas() -> Iterator[None]:
    """Models of applications that are built meanwhile have such replicas."""
    with MonkeyPatch.context() as patch:
        patch.setattr(serve_app.app, "ModelDeployment", MortalDeployment)
        yield


def _die_of(task: Task) -> None:
    prompt = task.prompt if isinstance(task, ChatTask) else None
    text = prompt.text if isinstance(prompt, RawText) else ""
    if text.startswith(POISON):
        with Path(text.removeprefix(POISON)).open("a") as deaths:
            deaths.write(f"{os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
