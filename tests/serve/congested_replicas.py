"""A deployment for tests of scaling: so slow that requests queue, however fast the machine is."""

import os
import threading
from typing import Any

import ray

from runtime.engine.engine import Engine
from serve_app.deployments.model_deployments import ModelDeployment

# Long prompts have some 30 steps, so that a few of them last until other replicas have started.
STEP_S = 1.0


class CongestedDeployment(ModelDeployment):
    """Steps of a replica last `STEP_S`, during which it computes nothing, from its first answer
    until it is relieved."""

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]
        self._relieved, self._answering = threading.Event(), False
        step = Engine.step

        def slow(engine: Engine) -> bool:
            if engine.statistics().completion_tokens_total:
                self._answering = True
                self._relieved.wait(STEP_S)
            return step(engine)

        Engine.step = slow
        await super().__init__(*args)

    async def answering(self) -> tuple[int, str] | None:
        """The process and the node of a replica that has begun an answer."""
        place = os.getpid(), ray.get_runtime_context().get_node_id()
        return place if self._answering else None

    async def relieve(self) -> None:
        self._relieved.set()
