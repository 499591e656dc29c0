"""Pulling, making, copying and deleting models: once for each store of the cluster."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from model_zoo.sources.pull import PullProgress
from model_zoo.store.definition import Definition
from runtime.errors import ModelNotFoundError, OverloadedError, RequestError
from serve_app.config.model_sources import sound_name
from serve_app.config.settings import ModelSettings, canonical_name
from serve_app.on_demand.commands import (
    Abort,
    Account,
    Answer,
    Append,
    Command,
    Copy,
    Create,
    Finish,
    Follow,
    Holds,
    Pull,
    Remove,
    Unload,
    Upload,
)
from serve_app.on_demand.definitions import configured_material, remote_material
from serve_app.on_demand.processes import PoolDirectory

LOOK_S = 0.2
PIECE_BYTES = 4 << 20
PIECE_S = 15.0
ENDED = "a process with models on demand has ended meanwhile; try again"


class Management:
    """What clients may do to the models on demand.

    `configured` models are not theirs to change. A configured name means the configured model here
    too, where a store has another of that name.
    """

    def __init__(
        self,
        pool: PoolDirectory,
        configured: Iterable[ModelSettings],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._configured = {canonical_name(model.name): model for model in configured}

    def material(self, text: str) -> Definition:
        """What a new model is made of, by the text of a request. RequestError when it is none."""
        model = self._configured.get(canonical_name(text))
        return remote_material(text) if model is None else configured_material(model)

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Its steps; as far as the slowest store is. Leaving early ends it, unless others wait.

        A configured model is where it belongs: clients pull a model to be sure that it is there.
        """
        if canonical_name(name) in self._configured:
            yield PullProgress("success")
            return
        async for step in self._followed(Pull(name)):
            yield step

    async def create(self, name: str, definition: Definition) -> AsyncGenerator[PullProgress, None]:
        """`definition`: as `material` has it."""
        self._refuse_configured(name)
        sound_name(name)
        sources = {configured_material(model).base for model in self._configured.values()}
        command = Create(name, definition, configured=definition.base in sources)
        async for step in self._followed(command):
            yield step

    async def copy(self, source: str, destination: str) -> None:
        """ModelNotFoundError unless a store has it; it is copied in those that do.

        A configured model is made a model of the store, for which its files may have to be copied.
        """
        self._refuse_configured(destination)
        sound_name(destination, f'destination "{destination}" is invalid')
        if canonical_name(source) in self._configured:
            async for _ in self.create(destination, self.material(source)):
                pass
            return
        sound_name(source, f'source "{source}" is invalid')
        await self._wherever_it_is(Copy(source, destination), source)

    async def delete(self, name: str) -> None:
        """Unloaded first, wherever it is loaded; what is being answered is answered."""
        self._refuse_configured(name)
        sound_name(name, f'name "{name}" is invalid')
        reports = await self._pool.processes()
        await self._pool.order([report.replica for report in reports], Unload(name))
        await self._wherever_it_is(Remove(name), name)

    async def holds(self, digest: str) -> bool:
        """Whether every store has the blob."""
        return all(await self._everywhere(Holds(digest)))

    async def upload(
        self, digest: str, size: int | None, content: AsyncIterable[bytes], *, tenant: str
    ) -> bool:
        """Brings the blob to every store; whether any lacked it. Whatever ends it early, such as a
        client that leaves, frees what has come."""
        if await self.holds(digest):
            return False
        store_managers, upload, offset = await self._pool.store_managers(), uuid.uuid4().hex, 0
        try:
            await self._ordered(store_managers, Upload(upload, digest, size, tenant))
            async for piece in _pieces(content, self._clock):
                await self._ordered(store_managers, Append(upload, offset, piece))
                offset += len(piece)
            await self._ordered(store_managers, Finish(upload))
        except BaseException:
            with suppress(Exception):  # an upload that is not aborted is dropped later
                await asyncio.shield(self._pool.order(store_managers, Abort(upload)))
            raise
        return True

    async def _followed(self, command: Command) -> AsyncGenerator[PullProgress, None]:
        try:
            operations = await self._begun(command)
            story = _Story(operations)
            while not story.done:
                for step in story.told(await self._accounts(operations, story)):
                    yield step
                if not story.done:
                    await asyncio.sleep(LOOK_S)
        finally:
            self._pool.forget()

    async def _begun(self, command: Command) -> dict[str, str]:
        """The jobs by process: in each store but those that have no file of the model."""
        store_managers = await self._pool.store_managers()
        answers = await self._pool.order(store_managers, command)
        if {answer.replica for answer in answers} != set(store_managers):
            raise OverloadedError(ENDED)
        operations, missing = {}, None
        for answer in answers:
            try:
                operations[answer.replica] = answer.result()
            except ModelNotFoundError as error:
                missing = error
        if missing is not None and not operations:
            raise missing
        return operations

    async def _accounts(self, operations: dict[str, str], story: "_Story") -> dict[str, Account]:
        return await self._each(
            {each: Follow(operations[each], story.heard[each]) for each in operations}
        )

    async def _each(self, commands: Mapping[str, Command]) -> dict[str, Any]:
        """A command of its own for each process."""
        asked = [self._pool.order([replica], command) for replica, command in commands.items()]
        answers = [answer for told in await asyncio.gather(*asked) for answer in told]
        return _results(answers, commands)

    async def _everywhere(self, command: Command) -> list[Any]:
        return [*(await self._ordered(await self._pool.store_managers(), command)).values()]

    async def _ordered(self, replicas: list[str], command: Command) -> dict[str, Any]:
        return _results(await self._pool.order(replicas, command), replicas)

    async def _wherever_it_is(self, command: Command, name: str) -> None:
        store_managers = await self._pool.store_managers()
        answers = await self._pool.order(store_managers, command)
        self._pool.forget()
        done = 0
        for answer in answers:
            try:
                answer.result()
                done += 1
            except ModelNotFoundError:
                pass
        if not done:
            raise ModelNotFoundError(f"model '{name}' not found")

    def _refuse_configured(self, name: str) -> None:
        if canonical_name(name) in self._configured:
            raise RequestError(
                f"model '{name}' is part of the configuration; it is changed there and nowhere else"
            )


class _Story:
    """What several jobs that do the same have told, as one: the slowest one's steps."""

    def __init__(self, operations: Iterable[str]) -> None:
        self.heard = dict.fromkeys(operations, 0)  # steps of each
        self.done = False
        self._last: PullProgress | None = None

    def told(self, accounts: dict[str, Account]) -> list[PullProgress]:
        """The steps that are new. They may go on in another job, where that is slower."""
        slowest = min(accounts, key=lambda each: _progress(accounts[each]))
        account = accounts[slowest]
        new = [step for step in account.steps if step != self._last]
        if account.steps:  # otherwise nothing is told yet, and the other jobs' steps may have to be
            for replica, each in accounts.items():
                self.heard[replica] = each.first + len(each.steps)
        self._last = new[-1] if new else self._last
        self.done = all(account.done for account in accounts.values())
        return new


def _progress(account: Account) -> tuple[bool, int, int]:
    last = account.steps[-1] if account.steps else PullProgress("")
    return account.done, account.first + len(account.steps), last.completed


def _results(answers: Iterable[Answer], replicas: Iterable[str]) -> dict[str, Any]:
    """By process. Raises what one of them has raised; OverloadedError when one is gone."""
    found = {answer.replica: answer.result() for answer in answers}
    if set(found) != set(replicas):
        raise OverloadedError(ENDED)
    return found


async def _pieces(
    content: AsyncIterable[bytes], clock: Callable[[], float]
) -> AsyncGenerator[bytes, None]:
    """The same bytes in pieces of `PIECE_BYTES`, or what has come in `PIECE_S`: uploads without
    progress are dropped."""
    buffer, begun_s = bytearray(), clock()
    async for data in content:
        buffer += data
        late = clock() - begun_s >= PIECE_S
        while len(buffer) >= PIECE_BYTES or (late and buffer):
            yield bytes(buffer[:PIECE_BYTES])
            del buffer[:PIECE_BYTES]
            begun_s = clock()
    if buffer:
        yield bytes(buffer)
