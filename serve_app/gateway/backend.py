"""The interface of the protocols to the models: takes tasks and yields deltas of their answers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime

from runtime.errors import (
    CaravanError,
    EngineDeadError,
    ModelUnavailableError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
)
from serve_app.gateway.allowed_models import AllowedModels
from serve_app.gateway.failover import FailoverRules, FailoverState
from serve_app.gateway.last_attempts import LastAttempts
from serve_app.gateway.model_registry import ModelRegistry, ServedModel
from serve_app.logs import get_logger
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import ChatDelta, EmbeddingTask, Task
from serve_app.telemetry import metrics
from serve_app.telemetry.meter import Meter, NoMeter
from serve_app.telemetry.reply_metrics import recorded
from serve_app.telemetry.request_spans import task_span
from serve_app.telemetry.spans import Spans
from serve_app.transport.client import StreamClient
from serve_app.transport.pauses import Pauses
from serve_app.transport.wire import Address, ConnectionLost, Heartbeat

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
# Limit for finding another replica while the current one still works on the task.
CHOICE_TIMEOUT_S = 0.1

log = get_logger()


class ChatBackend:
    """Sends each task to a replica, and to others if that one is lost, drained or overloaded.

    `start_timeout_s`: how long a task may wait for a replica, each time. `private_caches`: cached
    prefixes and images are not shared between tenants. `meter`, `spans`: record the answers.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        start_timeout_s: float,
        failover: FailoverRules | None = None,
        private_caches: bool = False,
        meter: Meter | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.registry = registry
        self._meter: Meter = meter or NoMeter()
        self._spans = spans
        self._start_timeout_s = start_timeout_s
        self._failover = failover or FailoverRules()
        self._private_caches = private_caches
        self._client = StreamClient(silence_s=self._failover.silence_s)
        self._last_attempts = LastAttempts()

    async def model(self, name: str, allowed: AllowedModels) -> ServedModel:
        """Raises ModelNotFoundError unless there is an allowed model of that name."""
        if not name:
            raise RequestError("model is required")
        async with self._start_timeout(name):
            return await self.registry.find(name, allowed)

    async def served(self, name: str, allowed: AllowedModels) -> ServedModel:
        """The model with all its options: the configured ones override its own."""
        model = await self.model(name, allowed)
        if not model.brings_options:
            return model
        card = await self.card(model)
        return replace(model, options=model.options.over(card.options))

    async def card(self, model: ServedModel, *, verbose: bool = False) -> ModelCard:
        async with self._start_timeout(model.name):
            return await self.registry.describe(model.name, verbose=verbose)

    async def load(self, model: ServedModel, keep_alive_s: float | None, *, tenant: str) -> None:
        """Returns when the model is loaded. Loading itself has no timeout; `start_timeout_s` bounds
        the search for a replica."""
        await self.card(model)
        await self.registry.load(model.name, keep_alive_s, tenant=tenant)

    async def unload(self, model: ServedModel) -> None:
        """Unloads a model on demand; configured models stay loaded."""
        async with self._start_timeout(model.name):
            await self.registry.unload(model.name)

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        """Deltas up to the one with `finish`. Leaving early aborts the task on its replica.

        If the replica is lost or drained, another one continues the answer from its tokens. Raises
        ReplicaLostError after too many losses, OverloadedError if no replica has room or runs.
        """
        if not isinstance(task, EmbeddingTask):
            salt = task.tenant if self._private_caches else ""
            task = replace(task, now=datetime.now(), cache_salt=salt)
        with (
            recorded(self._meter, task) as record,
            task_span(self._spans, task, record) as originated,
        ):
            async with aclosing(self._deltas(originated)) as deltas:
                async for delta in deltas:
                    record.note(delta)
                    yield delta

    async def _deltas(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        failover = FailoverState(task, self._failover)
        budget = _WaitBudget(self._start_timeout_s)
        ended = False
        while not ended:
            address = await self._place(failover, budget)
            async with aclosing(self._attempt(failover, address)) as deltas:
                async for delta in deltas:
                    ended = delta.finish is not None
                    yield delta
            if failover.answered:
                budget = _WaitBudget(self._start_timeout_s)

    async def _attempt(
        self, failover: FailoverState, address: Address
    ) -> AsyncGenerator[ChatDelta, None]:
        """The deltas of one replica until it has answered, is lost, refuses, or is replaced.

        A task whose next loss would end it starts alone: no other such task of the model starts
        until this one makes progress or ends. So a task that crashes replicas ends without those
        that shared its replicas.
        """
        async with self._last_attempts.place(failover) as place:
            failover.begin_attempt(address)
            stream = self._client.generate(address, failover.task)
            try:
                async with aclosing(stream) as messages:
                    async for message in messages:
                        if isinstance(message, ChatDelta):
                            delta = failover.accept(message)
                            with place.delivery():
                                yield delta
                        elif isinstance(message, Heartbeat):
                            if await self._moved(failover):
                                return
                        elif await self._handed_over(failover):
                            return
            except OverloadedError as refusal:
                failover.record_refusal(refusal)
                self._count(failover, "refused")
            except (ConnectionLost, EngineDeadError, ReplicaLostError) as lost:
                at_work = isinstance(lost, ReplicaLostError) or getattr(lost, "at_work", False)
                if at_work:
                    log.info("replica lost", **failover.log_fields, reason=str(lost))
                    self._count(failover, "lost")
                failover.lose_replica(str(lost), at_work=at_work)

    def _count(self, failover: FailoverState, cause: str) -> None:
        self._meter.add(metrics.FAILOVERS, 1, failover.model, cause)

    async def _moved(self, failover: FailoverState) -> bool:
        """True if a queued task continues on another replica, which will start it far earlier."""
        if not failover.movable:
            return False
        try:
            async with asyncio.timeout(CHOICE_TIMEOUT_S):
                address = await self.registry.choose_earlier(failover.task, avoid=failover.avoid)
        except (TimeoutError, CaravanError):
            return False
        if address is None:
            return False
        log.info("moved", **failover.log_fields, to=address.replica)
        self._count(failover, "moved")
        failover.hand_over(address)
        return True

    async def _handed_over(self, failover: FailoverState) -> bool:
        """True if another replica continues now for one that drains."""
        failover.skip(failover.replica)
        try:
            async with asyncio.timeout(CHOICE_TIMEOUT_S):
                address = await self.registry.choose(
                    failover.task, avoid=failover.avoid, identity=failover.identity
                )
        except (TimeoutError, CaravanError):  # no other replica; the draining one still answers
            return False
        if address.replica in failover.avoid or not failover.can_continue_on(address):
            return False
        log.info("replica drained", **failover.log_fields)
        self._count(failover, "drained")
        failover.hand_over(address)
        return True

    async def _place(self, failover: FailoverState, budget: "_WaitBudget") -> Address:
        """The replica for the next attempt, within the budget.

        Replicas that failed the task before get it again, after a pause, if there is no other one.
        An answer that has begun waits even while no node can host the model.
        """
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            async with asyncio.timeout(budget.left_s):
                while True:
                    address, failover.next_replica = failover.next_replica, None
                    try:
                        address = address or await self.registry.choose(
                            failover.task, avoid=failover.avoid, identity=failover.identity
                        )
                    except ModelUnavailableError:
                        if not failover.begun:
                            raise
                        await budget.pause()
                        continue
                    able = failover.can_continue_on(address)
                    if not able or address.replica in failover.avoid:
                        await self._pause_without_another(failover, address, budget)
                    if able:
                        return address
        except TimeoutError:
            raise self._unreachable(failover.model) from None
        finally:
            budget.left_s -= clock() - begun

    async def _pause_without_another(
        self, failover: FailoverState, address: Address, budget: "_WaitBudget"
    ) -> None:
        """The registry has nothing better than a replica that failed the task or cannot continue
        it. Raises if that is final: all have other models, or it is full and the task is new. A
        replica that could not load its model is replaced soon."""
        if address.model and not failover.can_continue_on(address):
            raise ReplicaLostError(
                f"Model '{failover.model}' was replaced by another one, or by one with another "
                "context or other defaults, while it answered."
            )
        if failover.refusal is not None and not failover.begun:
            raise failover.refusal
        failover.retry_full_replicas()
        await budget.pause()

    def close(self) -> None:
        self._client.close()

    @asynccontextmanager
    async def _start_timeout(self, model: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                yield
        except TimeoutError:
            raise self._unreachable(model) from None

    def _unreachable(self, model: str) -> OverloadedError:
        return OverloadedError(
            f"no replica of model '{model}' has answered within {self._start_timeout_s:g} seconds"
        )


class _WaitBudget:
    """The remaining time that a task may wait for a replica, and growing pauses between tries; the
    second try follows at once."""

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s
        self._pauses: Pauses | None = None

    async def pause(self) -> None:
        if self._pauses is None:
            self._pauses = Pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._pauses.take())
