"""A loader of models that take only numbers, for tests of what holds them."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator

from runtime.engine.engine import EngineStatistics
from runtime.engine.request import FinishReason, Usage
from runtime.errors import EngineDeadError, ModelNotFoundError
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import ChatDelta, ChatTask
from serve_app.on_demand.model_pool import Found, Sizes
from tests.patience import HANG_S
from tests.unit.serve_app.pretend import CARD

USAGE = Usage(1, 0, 1, queue_ns=1_000, prompt_ns=2_000, decode_ns=3_000)


class PretendModel:
    """Answers with its own name, unless another one has said that, and ends once it may; `dead` is
    what its health check says."""

    def __init__(self, found: Found, memory_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.found = found
        self.dead = False
        self.waiting = 2
        self.closed = False
        self.may_end = asyncio.Event()
        loop.call_soon_threadsafe(self.may_end.set)
        self._card = card(found, memory_bytes)

    async def generate(self, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        assert not self.closed
        if not (task.begun and task.begun.tokens):
            yield ChatDelta(self.found.name, (1,))
        await self.may_end.wait()
        assert not self.closed
        yield ChatDelta(finish=FinishReason.STOP, usage=USAGE)

    def describe(self, *, verbose: bool = False) -> ModelCard:
        return self._card

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(running=1, waiting=self.waiting, slots=4, steps_total=7)

    def check(self) -> None:
        if self.dead:
            raise EngineDeadError("dead")


class PretendLoader:
    """`sizes`: what each model takes, least and full. `loads` and `unloads` by name, in order."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        self.digests = dict.fromkeys(sizes, "first")
        self.free = 10**12
        self.loads: list[tuple[str, int]] = []
        self.unloads: list[str] = []
        self.models: dict[str, PretendModel] = {}
        self.fails: Exception | None = None
        self.may_load = threading.Event()
        self.may_load.set()
        self._loop = asyncio.get_running_loop()

    def find(self, name: str) -> Found:
        if name.lower() not in self.sizes:
            raise ModelNotFoundError(f"model '{name}' not found")
        return Found(name.lower(), self.digests[name.lower()])

    def outline(self, found: Found, verbose: bool = False) -> tuple[ModelCard, Sizes]:
        least, full = self.sizes[found.name]
        return card(found, 0), Sizes(least, full)

    def load(self, found: Found, memory_bytes: int) -> PretendModel:
        assert self.may_load.wait(HANG_S)
        if self.fails is not None:
            raise self.fails
        self.loads.append((found.name, memory_bytes))
        self.models[found.name] = PretendModel(found, memory_bytes, self._loop)
        return self.models[found.name]

    def unload(self, replica: PretendModel) -> None:
        replica.closed = True
        self.unloads.append(replica.found.name)

    def free_bytes(self) -> int:
        return self.free


def card(found: Found, memory_bytes: int) -> ModelCard:
    return dataclasses.replace(
        CARD, name=found.name, digest=found.digest, reserved_bytes=memory_bytes
    )
