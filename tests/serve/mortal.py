"""The deployment of a model with a weakness, and with eyes on its replicas; for tests alone."""

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
from runtime.engine import Engine
from serve_app.deployments import ModelDeployment
from serve_app.replica import ModelReplica
from serve_app.task import ChatDelta, ChatTask, RawText

POISON = "poison "


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen of a replica. `continued`: answers that it got from others."""

    pid: int
    running: int
    continued: int


class MortalDeployment(ModelDeployment):
    """Its replicas die of answering the raw prompt "poison FILE"; FILE gets their ids.

    Answers can be made to take their time, so that one can be met in the middle.
    """

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]
        self._continued, self._step_s = 0, 0.0
        generate, step = ModelReplica.generate, Engine.step

        def paced(engine: Engine) -> bool:
            time.sleep(self._step_s)
            return step(engine)

        Engine.step = paced

        async def mortal(replica: ModelReplica, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
            self._continued += bool(task.begun and task.begun.tokens)
            async with aclosing(generate(replica, task)) as deltas:
                async for delta in deltas:
                    _die_of(task)
                    yield delta

        ModelReplica.generate = mortal
        await super().__init__(*args)

    async def pace(self, step_s: float) -> None:
        self._step_s = step_s

    async def sight(self) -> Sight:
        return Sight(os.getpid(), self._replica.statistics().running, self._continued)


@contextmanager
def mortal_replicas() -> Iterator[None]:
    """Models of applications that are built meanwhile have such replicas."""
    with MonkeyPatch.context() as patch:
        patch.setattr(serve_app.app, "ModelDeployment", MortalDeployment)
        yield


def _die_of(task: ChatTask) -> None:
    text = task.prompt.text if isinstance(task.prompt, RawText) else ""
    if text.startswith(POISON):
        with Path(text.removeprefix(POISON)).open("a") as deaths:
            deaths.write(f"{os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
