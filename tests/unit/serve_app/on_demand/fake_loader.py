"""A loader of fake models, for tests of the pool."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator

from runtime.engine.engine_statistics import EngineStatistics
from runtime.engine.request import FinishReason, Usage
from runtime.errors import EngineDeadError, ModelNotFoundError
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import ChatDelta, ChatTask
from serve_app.on_demand.model_pool import MemoryNeed
from serve_app.on_demand.pooled_model import StoredVersion
from tests.patience import HANG_S
from tests.unit.serve_app.fake_replicas import CARD

USAGE = Usage(1, 0, 1, queue_ns=1_000, prompt_ns=2_000, decode_ns=3_000)


class FakeModel:
    """Generates its own name, unless the task continues one, and ends after `may_end` is set; with
    `dead` its health check fails."""

    def __init__(
        self,
        version: StoredVersion,
        memory_bytes: int,
        loop: asyncio.AbstractEventLoop,
        context_tokens: int = CARD.context_tokens,
    ) -> None:
        self.version = version
        self.dead = False
        self.waiting = 2
        self.closed = False
        self.begun = False
        self.may_end = asyncio.Event()
        loop.call_soon_threadsafe(self.may_end.set)
        self._card = card(version, memory_bytes, context_tokens)

    async def generate(self, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        assert not self.closed
        if not (task.resume and task.resume.tokens):
            yield ChatDelta(self.version.name, (1,))
            self.begun = True
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


class FakeLoader:
    """`context_tokens`: of each model. `sizes`: minimum and full bytes of each model, then its base
    and the bytes that it shares with other models of that. `loads` and `unloads`: names in
    order."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        self.context_tokens = CARD.context_tokens
        self.digests = dict.fromkeys(sizes, "first")
        self.free = 10**12
        self.unreclaimed = 0  # bytes that `reclaim` makes free
        self.loads: list[tuple[str, int]] = []
        self.unloads: list[str] = []
        self.models: dict[str, FakeModel] = {}
        self.fails: Exception | None = None
        self.may_load = threading.Event()
        self.may_load.set()
        self.may_unload = threading.Event()
        self.may_unload.set()
        self.unloading = False
        self._loop = asyncio.get_running_loop()

    def find(self, name: str) -> StoredVersion:
        if name.lower() not in self.sizes:
            raise ModelNotFoundError(f"model '{name}' not found")
        return StoredVersion(name.lower(), self.digests[name.lower()])

    def outline(
        self, version: StoredVersion, verbose: bool = False
    ) -> tuple[ModelCard, MemoryNeed]:
        return card(version, 0, self.context_tokens), MemoryNeed(*self.sizes[version.name])

    def load(self, version: StoredVersion, memory_bytes: int) -> FakeModel:
        assert self.may_load.wait(HANG_S)
        if self.fails is not None:
            raise self.fails
        self.loads.append((version.name, memory_bytes))
        self.models[version.name] = FakeModel(
            version, memory_bytes, self._loop, self.context_tokens
        )
        return self.models[version.name]

    def unload(self, replica: FakeModel) -> None:
        self.unloading = True
        assert self.may_unload.wait(HANG_S)
        self.unloading = False
        replica.closed = True
        self.unloads.append(replica.version.name)

    def reclaim(self) -> None:
        self.free, self.unreclaimed = self.free + self.unreclaimed, 0

    def free_bytes(self, shared_bytes: int = 0) -> int:
        return self.free + shared_bytes


def card(
    version: StoredVersion, memory_bytes: int, context_tokens: int = CARD.context_tokens
) -> ModelCard:
    return dataclasses.replace(
        CARD,
        name=version.name,
        digest=version.digest,
        reserved_bytes=memory_bytes,
        context_tokens=context_tokens,
    )
