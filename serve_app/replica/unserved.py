"""What stands for a model that could not be loaded: it says why, and makes room for another try."""

import time
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn

from runtime.engine.engine import EngineStatistics
from runtime.errors import EngineDeadError, ModelUnavailableError
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import ChatDelta, Task
from serve_app.logs import get_logger

# Then Serve replaces the process, and the model is tried anew: with another's memory, maybe.
RETRY_S = 45.0

log = get_logger()


class UnservedReplica:
    """Like ModelReplica, but every request is told the `reason`.

    Were the process to end instead, Serve would try it a few times in a row, then never again, and
    all that clients saw would be that nobody answers.
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
            raise EngineDeadError(f"Model {self._model} is tried again: {self._reason}")

    def close(self) -> None:
        """There is nothing to end."""

    def _refuse(self) -> NoReturn:
        raise ModelUnavailableError(f"model '{self._model}' cannot be served: {self._reason}")
