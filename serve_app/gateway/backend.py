"""The one thing that the protocols talk to: tasks in, deltas out, from whichever replica."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from runtime.errors import (
    CaravanError,
    EngineDeadError,
    ModelUnavailableError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
)
from serve_app.api.keys import AllowedModels
from serve_app.gateway.catalogue import Catalogue, ServedModel
from serve_app.gateway.failover import FailoverRules, FailoverState
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import ChatDelta, ChatTask, Task
from serve_app.logs import get_logger
from serve_app.transport.client import ConnectionLost, StreamClient
from serve_app.transport.wire import Address, Heartbeat

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
# How long a stream may stand still because a replica that leaves has asked to be replaced.
LOOK_S = 0.1

log = get_logger()


class Directory(Protocol):
    """Knows the replicas of each configured model."""

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address:
        """Where the replica listens that should take the task. Waits until there is one.

        One of `avoid`, which are names of replicas, only where there is no other.
        """

    async def better(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address | None:
        """Where a task begins far earlier than where it waits, never one of `avoid`."""

    async def describe(self, model: str, *, verbose: bool) -> ModelCard: ...

    async def load(self, model: str, keep_alive_s: float | None, *, tenant: str) -> None:
        """Returns once the model is there."""

    async def unload(self, model: str) -> None: ...


class ChatBackend:
    """Follows each request to the replica that answers it, and on to others.

    `start_timeout_s`: how long a request may be without a replica, each time. `private_caches`:
    whether each tenant has cached prefixes and images of its own.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        directory: Directory,
        *,
        start_timeout_s: float,
        failover: FailoverRules | None = None,
        private_caches: bool = False,
    ) -> None:
        self.catalogue = catalogue
        self._directory = directory
        self._start_timeout_s = start_timeout_s
        self._failover = failover or FailoverRules()
        self._private_caches = private_caches
        self._client = StreamClient(silence_s=self._failover.silence_s)

    async def model(self, name: str, allowed: AllowedModels) -> ServedModel:
        """The model of that name. ModelNotFoundError when there is none among the allowed ones."""
        if not name:
            raise RequestError("model is required")
        async with self._in_time(name):
            return await self.catalogue.find(name, allowed)

    async def served(self, name: str, allowed: AllowedModels) -> ServedModel:
        """The model with all its options: the configured ones, then its own."""
        model = await self.model(name, allowed)
        if not model.brings_options:
            return model
        card = await self.card(model)
        return replace(model, options=model.options.over(card.options))

    async def card(self, model: ServedModel, *, verbose: bool = False) -> ModelCard:
        async with self._in_time(model.name):
            return await self._directory.describe(model.name, verbose=verbose)

    async def load(self, model: ServedModel, keep_alive_s: float | None, *, tenant: str) -> None:
        """Loading itself has no timeout; `start_timeout_s` bounds the search for a replica."""
        await self.card(model)
        await self._directory.load(model.name, keep_alive_s, tenant=tenant)

    async def unload(self, model: ServedModel) -> None:
        """A configured model stays loaded all the same."""
        async with self._in_time(model.name):
            await self._directory.unload(model.name)

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        """Deltas up to the one with `finish`. Leaving early ends the work on the replica.

        A replica that is lost or leaves is no loss: the answer goes on elsewhere, from what it has.
        ReplicaLostError: that was tried too often. OverloadedError: nobody has room, or nobody is
        there.
        """
        if isinstance(task, ChatTask):
            salt = task.tenant if self._private_caches else ""
            task = replace(task, now=datetime.now(), cache_salt=salt)
        failover = FailoverState(task, self._failover)
        waiting = _Waiting(self._start_timeout_s)
        ended = False
        while not ended:
            address = await self._place(failover, waiting)
            async with aclosing(self._attempt(failover, address)) as deltas:
                async for delta in deltas:
                    ended = delta.finish is not None
                    yield delta
            if failover.fruitful:
                waiting = _Waiting(self._start_timeout_s)

    async def _attempt(
        self, failover: FailoverState, address: Address
    ) -> AsyncGenerator[ChatDelta, None]:
        """What one replica tells, until it has answered, is lost, refuses, or is replaced."""
        failover.begin(address)
        asked = self._client.generate(address, failover.task, trial_tokens=failover.trial_tokens)
        try:
            async with aclosing(asked) as told:
                async for each in told:
                    if isinstance(each, ChatDelta):
                        yield failover.taken(each)
                    elif isinstance(each, Heartbeat):
                        if await self._moves(failover):
                            return
                    elif await self._replaceable(failover):
                        return
        except OverloadedError as refusal:
            failover.refused(refusal)
        except (ConnectionLost, EngineDeadError, ReplicaLostError) as lost:
            at_work = isinstance(lost, ReplicaLostError) or getattr(lost, "at_work", False)
            if at_work:
                log.info("replica lost", **failover.facts, reason=str(lost))
            failover.lost(str(lost), at_work=at_work)

    async def _moves(self, failover: FailoverState) -> bool:
        """Whether a task that still waits goes where it begins far earlier."""
        if not failover.movable:
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                address = await self._directory.better(failover.task, avoid=failover.avoid)
        except (TimeoutError, CaravanError):
            return False
        if address is None:
            return False
        log.info("moved", **failover.facts, to=address.replica)
        failover.hand_over(address)
        return True

    async def _replaceable(self, failover: FailoverState) -> bool:
        """Whether another replica can go on, now, for one that leaves."""
        failover.pass_over(failover.replica)
        try:
            async with asyncio.timeout(LOOK_S):
                address = await self._directory.choose(failover.task, avoid=failover.avoid)
        except (TimeoutError, CaravanError):  # there is none now; this one still answers
            return False
        if address.replica in failover.avoid or not failover.suits(address):
            failover.pass_over(address.replica)
            return False
        log.info("replica left", **failover.facts)
        failover.hand_over(address)
        return True

    async def _place(self, failover: FailoverState, waiting: "_Waiting") -> Address:
        """Where the task goes next."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            async with asyncio.timeout(waiting.left_s):
                return await self._placed(failover, waiting)
        except TimeoutError:
            raise self._unreachable(failover.model) from None
        finally:
            waiting.left_s -= clock() - begun

    async def _placed(self, failover: FailoverState, waiting: "_Waiting") -> Address:
        """Where there is no other, those that have failed the task get it again, after a pause."""
        while True:
            address = failover.next or await self._chosen(failover, waiting)
            failover.next = None
            suited = failover.suits(address)
            if address.replica in failover.avoid:
                if not suited:
                    raise ReplicaLostError(
                        f"Model '{failover.model}' was replaced by another one while it answered."
                    )
                if failover.refusal is not None and not failover.begun:
                    raise failover.refusal
                failover.ask_full_ones_again()
                await waiting.pause()
            if suited:
                return address
            failover.pass_over(address.replica)

    async def _chosen(self, failover: FailoverState, waiting: "_Waiting") -> Address:
        """Where the cluster has no place for the model, an answer that has begun waits for one."""
        while True:
            try:
                return await self._directory.choose(failover.task, avoid=failover.avoid)
            except ModelUnavailableError:
                if not failover.begun:
                    raise
            await waiting.pause()

    def close(self) -> None:
        self._client.close()

    @asynccontextmanager
    async def _in_time(self, model: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                yield
        except TimeoutError:
            raise self._unreachable(model) from None

    def _unreachable(self, model: str) -> OverloadedError:
        return OverloadedError(
            f"no replica of model '{model}' has answered within {self._start_timeout_s:g} seconds"
        )


class _Waiting:
    """How long a task may still be without a replica, and how long it pauses between tries."""

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s
        self._pause_s = 0.0

    async def pause(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
