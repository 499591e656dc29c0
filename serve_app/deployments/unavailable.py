"""Takes the place of what could not be loaded: answers with the reason until a retry.

Only where no other replica serves the same. If one does, the constructor fails: an update whose
new replicas cannot load their models then stops and leaves the old ones, and Serve retries others.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, ClassVar, NoReturn

from runtime.engine.engine_statistics import EngineStatistics
from runtime.errors import CaravanError, EngineDeadError, ModelUnavailableError
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import ChatDelta, Task
from serve_app.on_demand.pool_load import PoolLoad
from serve_app.on_demand.report import CallResult, PoolReport
from serve_app.routing.replica_calls import Replicas

if TYPE_CHECKING:
    from serve_app.vision.encoder_replica import EncoderStatistics

# After this time the health check fails, and Serve starts a new process, which retries the load.
RETRY_S = 45.0
# How long the other replicas are waited for, until they are listed and until they answer.
OTHERS_S = 10.0


async def any_serves(replicas: Replicas, method: str) -> bool:
    """Whether any of the replicas has loaded what it serves, as far as they answer in time.
    `method`: one that raises an error where nothing is loaded."""
    try:
        async with asyncio.timeout(OTHERS_S):
            await replicas.await_one()
        return bool(await replicas.ask_all(method, timeout_s=OTHERS_S))
    except (TimeoutError, CaravanError):
        return False


class Unavailable:
    """`what` could not be loaded, such as "model 'demo'". `probe`: a method of its deployment that
    raises an error in replicas that could not load it.

    If the constructor failed without another replica, Serve would retry a few times in a row and
    then give up, and clients would not get the reason.
    """

    probe: ClassVar[str]

    def __init__(
        self, what: str, reason: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._reason = reason
        self._clock = clock
        self._since = clock()

    def check(self) -> None:
        if self._clock() - self._since > RETRY_S:
            raise EngineDeadError(f"A new process is to load {self._what}: {self._reason}")

    def refuse(self) -> NoReturn:
        raise ModelUnavailableError(f"{self._what} cannot be served: {self._reason}")

    def close(self) -> None:
        """Nothing to release."""


class UnavailableReplica(Unavailable):
    """Like ModelReplica, but every request fails."""

    probe = "describe"

    @property
    def identity(self) -> str:
        """Empty: it continues no answer."""
        return ""

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        self.refuse()
        yield ChatDelta()

    def describe(self, *, verbose: bool = False) -> ModelCard:
        self.refuse()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()


class UnavailableEncoder(Unavailable):
    """Like EncoderReplica, but encodes no image."""

    probe = "address"

    def statistics(self) -> "EncoderStatistics":
        from serve_app.vision.encoder_replica import EncoderStatistics  # with torch, so late

        return EncoderStatistics(0, 0, 0, 0)


class UnavailableStoreManager(Unavailable):
    """Like StoreManager, but loads no model and does not access the store."""

    probe = "report"

    async def report(self) -> PoolReport:
        self.refuse()

    async def call(self, method: str, *arguments: object) -> CallResult:
        self.refuse()

    def statistics(self) -> dict[str, EngineStatistics]:
        return {}

    def measures(self) -> dict[str, float]:
        pool = PoolLoad().metrics([], held_requests=0, used_share=0.0)
        return {**pool, "operations": 0.0}
