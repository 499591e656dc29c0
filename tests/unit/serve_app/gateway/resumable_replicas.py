"""Fake replicas that continue each other's answers and die in the middle of one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from runtime.engine.request import FinishReason, Usage
from runtime.errors import CaravanError
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.failover import FailoverRules
from serve_app.messages.tasks import ChatDelta, ChatTask
from serve_app.transport.generation import generation_server
from serve_app.transport.wire import Address
from tests.patience import HANG_S, until
from tests.unit.serve_app.fake_replicas import CARD, backend_of

WORDS = tuple(f"word{index} " for index in range(12))
TEXT = "".join(WORDS)


class ResumableReplica:
    """Continues an answer from the task's tokens; token n is word n.

    `dies_at`: the process is lost before this token, with all its tasks. `halts_at`: before this
    token it waits for `resume`. `error`: raised instead of an answer.
    """

    def __init__(
        self,
        *,
        dies_at: int | None = None,
        halts_at: int | None = None,
        error: CaravanError | None = None,
        heartbeat_s: float = 0.05,
        model: str = "one",
    ) -> None:
        self.dies_at = dies_at
        self.halts_at = halts_at
        self.error = error
        self.model = model
        self.resume = asyncio.Event()
        self.halted = 0
        self.tasks: list[ChatTask] = []
        self.running = 0
        self.server = generation_server(lambda task: self.generate(task), heartbeat_s=heartbeat_s)
        self.dying: asyncio.Task[None] | None = None

    async def start(self) -> Address:
        address = await self.server.start("127.0.0.1")
        return Address(address.host, address.port, address.token, address.replica, self.model)

    def die(self) -> None:
        if self.dying is None:
            self.dying = asyncio.create_task(self.server.close(drain_s=0))

    async def generate(self, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        self.tasks.append(task)
        if self.error is not None:
            raise self.error
        self.running += 1
        begun = task.resume.tokens if task.resume else ()
        assert begun == tuple(range(len(begun)))
        try:
            for index in range(len(begun), len(WORDS)):
                await self.before(task, index)
                first = index == len(begun)
                yield ChatDelta(WORDS[index], (index,), usage=usage(index + 1) if first else None)
            yield ChatDelta(finish=FinishReason.LENGTH, usage=usage(len(WORDS)))
        finally:
            self.running -= 1

    async def before(self, task: ChatTask, index: int) -> None:
        if index == self.halts_at:
            self.halted += 1
            await self.resume.wait()
        if index == self.dies_at:
            self.die()
            await asyncio.Event().wait()


def usage(completion: int) -> Usage:
    return Usage(5, 4, completion, 1_000, 2_000, 3_000)


class FakeReplicaSet:
    """Chooses the first replica that is not avoided, and one of another model only if there is no
    other. `problem`: raised instead.

    `earlier`: replicas that would start a queued task earlier, one for each call; the last one is
    repeated.
    """

    def __init__(self, *addresses: Address) -> None:
        self.addresses = list(addresses)
        self.choices = 0
        self.problem: CaravanError | None = None
        self.earlier: list[Address] = []
        self.earlier_calls = 0

    async def choose(self, task, *, avoid: frozenset[str] = frozenset(), identity=None) -> Address:
        self.choices += 1
        if self.problem is not None:
            raise self.problem
        await until(lambda: self.addresses)
        able = [a for a in self.addresses if (a.model == identity if identity else a.model)]
        others = [each for each in able if each.replica not in avoid]
        return (others or able or self.addresses)[0]

    async def choose_earlier(self, task, *, avoid: frozenset[str] = frozenset()) -> Address | None:
        self.earlier_calls += 1
        if self.problem is not None:
            raise self.problem
        if len(self.earlier) > 1:
            return self.earlier.pop(0)
        return self.earlier[0] if self.earlier else None

    async def describe(self, *, verbose: bool):
        return CARD


@asynccontextmanager
async def serving(
    *replicas: ResumableReplica,
    rules: FailoverRules | None = None,
    start_timeout_s: float = HANG_S,
) -> AsyncIterator[tuple[ChatBackend, FakeReplicaSet]]:
    """A backend in front of these replicas, and its replica set."""
    async with AsyncExitStack() as stack:
        addresses = []
        for replica in replicas:
            addresses.append(await replica.start())
            stack.push_async_callback(replica.server.close, drain_s=0)
        known = FakeReplicaSet(*addresses)
        backend = backend_of(
            known, start_timeout_s=start_timeout_s, failover=rules or FailoverRules()
        )
        stack.callback(backend.close)
        yield backend, known
