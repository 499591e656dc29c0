"""Takes the place of a model that could not be loaded: answers with the reason until a retry."""

import time
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn

from runtime.engine.engine_statistics import EngineStatistics
from runtime.errors import EngineDeadError, ModelUnavailableError
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import ChatDelta, Task
from serve_app.logs import get_logger

# After this time the health check fails, and Serve starts a new process, which retries the load.
RETRY_S = 45.0

log = get_logger()


class UnservedReplica:
    """Like ModelReplica, but every request fails with `reason`.

    If the constructor failed instead, Serve would retry a few times in a row and then give up, and
    clients would not get the reason.
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
