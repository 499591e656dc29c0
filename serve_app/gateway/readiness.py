"""Whether the models have started, which decides when a load balancer may send requests."""

import asyncio
from collections.abc import Collection
from typing import Protocol

CHECK_S = 1.0


class StartingModel(Protocol):
    """A configured model; see serve_app.routing.replica_set.ReplicaSet."""

    @property
    def serving(self) -> bool: ...


class Readiness:
    """Whether all models have had a replica. Once reached it stays: a model that fails or is added
    later must not take the others out of service.

    `models`: those that should always have a replica. `patience_s`: after this time one of them
    suffices, or none if there are other models that start for their first request (`others`), so
    that a model that cannot be loaded does not hold back the others forever.
    """

    def __init__(
        self, models: Collection[StartingModel], *, patience_s: float, others: bool
    ) -> None:
        self._models = models
        self._patience_s = patience_s
        self._others = others
        self.reached = not models

    async def watch(self) -> None:
        """Returns when it is reached."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience_s
        while not self.reached:
            serving = [model.serving for model in self._models]
            late = clock() >= deadline
            self.reached = all(serving) or (late and (self._others or any(serving)))
            await asyncio.sleep(CHECK_S)
