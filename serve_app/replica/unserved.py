"""Takes the place of a model that could not be loaded: answers with the reason until a retry.

Only where no other replica serves the model. If one does, the constructor fails: an update whose
new replicas cannot load the model then stops and leaves the old ones, and Serve retries others.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn

from runtime.engine.engine_statistics import EngineStatistics
from runtime.errors import CaravanError, EngineDeadError, ModelUnavailableError
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.replica_calls import Replicas
from serve_app.gateway.tasks import ChatDelta, Task
from serve_app.logs import get_logger

# After this time the health check fails, and Serve starts a new process, which retries the load.
RETRY_S = 45.0
# How long the other replicas are waited for, until they are listed and until they answer.
OTHERS_S = 10.0

log = get_logger()


async def any_serves(replicas: Replicas) -> bool:
    """Whether any of the replicas has loaded its model, as far as they answer in time."""
    try:
        async with asyncio.timeout(OTHERS_S):
            await replicas.await_one()
        return bool(await replicas.ask_all("describe", timeout_s=OTHERS_S))
    except (TimeoutError, CaravanError):
        return False


class UnservedReplica:
    """Like ModelReplica, but every request fails with `reason`.

    If the constructor failed without another replica, Serve would retry a few times in a row and
    then give up, and clients would not get the reason.
    """

    def __init__(
        self, model: str, reason: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._model = model
        self._reason = reason
        self._clock = clock
        self._since = clock()
        log.error("not served", model=model, reason=reason)

    @property
    def identity(self) -> str:
        """Empty: it continues no answer."""
        return ""

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        self._refuse()
        yield ChatDelta()

    def describe(self, *, verbose: bool = False) -> ModelCard:
        self._refuse()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()

    def check(self) -> None:
        if self._clock() - self._since > RETRY_S:
            raise EngineDeadError(f"Model {self._model} is loaded again: {self._reason}")

    def close(self) -> None:
        """Nothing to release."""

    def _refuse(self) -> NoReturn:
        raise ModelUnavailableError(f"model '{self._model}' cannot be served: {self._reason}")
