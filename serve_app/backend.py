"""The one thing that the protocols talk to: tasks in, deltas out, from whichever replica."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from runtime.errors import (
    EngineDeadError,
    ModelNotFoundError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
)
from serve_app.card import ModelCard
from serve_app.options import Options
from serve_app.settings import canonical_name
from serve_app.stream.client import ConnectionLost, StreamClient
from serve_app.stream.wire import Address
from serve_app.task import ChatDelta, Task

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
LISTING_TIMEOUT_S = 5.0


class Directory(Protocol):
    """Knows the replicas of each configured model."""

    async def choose(self, model: str) -> Address:
        """Where the replica listens that should take the next task. Waits until there is one."""

    async def describe(self, model: str, *, verbose: bool) -> ModelCard: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A configured model and the options that its requests start from.

    `brings_options`: it may have some of its own, which only a replica knows.
    """

    name: str
    options: Options
    brings_options: bool = False


class ChatBackend:
    """Follows each request to the replica that answers it."""

    def __init__(
        self, models: Iterable[ServedModel], directory: Directory, *, start_timeout_s: float
    ) -> None:
        self._models = {canonical_name(model.name): model for model in models}
        self._directory = directory
        self._start_timeout_s = start_timeout_s
        self._client = StreamClient()

    @property
    def models(self) -> tuple[ServedModel, ...]:
        return tuple(self._models.values())

    def model(self, name: str) -> ServedModel:
        if not name:
            raise RequestError("model is required")
        served = self._models.get(canonical_name(name))
        if served is None:
            raise ModelNotFoundError(f"model '{name}' not found")
        return served

    async def served(self, name: str) -> ServedModel:
        """The model with all its options: the configured ones, then its own."""
        model = self.model(name)
        if not model.brings_options:
            return model
        card = await self.card(model)
        return replace(model, options=model.options.over(card.options))

    async def cards(self) -> list[ModelCard]:
        """Those of the models that answer soon; one that is down takes no other off the list."""
        asked = (self.card(model, timeout_s=LISTING_TIMEOUT_S) for model in self.models)
        cards = await asyncio.gather(*asked, return_exceptions=True)
        return [card for card in cards if isinstance(card, ModelCard)]

    async def card(
        self, model: ServedModel, *, verbose: bool = False, timeout_s: float | None = None
    ) -> ModelCard:
        try:
            async with asyncio.timeout(timeout_s or self._start_timeout_s):
                return await self._directory.describe(model.name, verbose=verbose)
        except TimeoutError:
            raise self._unreachable(model.name) from None

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        """Deltas up to the one with `finish`. Leaving early ends the work on the replica.

        Until the first delta a lost connection or a dead engine is no loss: another replica, or
        the same one once it is back, is asked again. After it the answer cannot be saved:
        ReplicaLostError.
        """
        deadline = time.monotonic() + self._start_timeout_s
        pause_s = 0.0
        while True:
            begun = False
            address = await self._choose(task.model, deadline)
            try:
                async with aclosing(self._client.generate(address, task)) as deltas:
                    async for delta in deltas:
                        begun = True
                        yield delta
                return
            except (ConnectionLost, EngineDeadError) as lost:
                if begun:
                    raise ReplicaLostError(f"The model's replica is gone: {lost}") from lost
            if time.monotonic() + pause_s > deadline:
                raise self._unreachable(task.model)
            await asyncio.sleep(pause_s)
            pause_s = min(max(FIRST_PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)

    def close(self) -> None:
        self._client.close()

    async def _choose(self, model: str, deadline: float) -> Address:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await self._directory.choose(model)
        except TimeoutError:
            raise self._unreachable(model) from None

    def _unreachable(self, model: str) -> OverloadedError:
        return OverloadedError(
            f"no replica of model '{model}' has answered within {self._start_timeout_s:g} seconds"
        )
