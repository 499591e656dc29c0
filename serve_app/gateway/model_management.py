"""Pulling, pushing, creating, copying and deleting models, once for each store of the cluster."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any

from model_zoo.sources.pull import PullProgress
from model_zoo.store.definition import Definition
from runtime.errors import ModelNotFoundError, OverloadedError, RequestError
from serve_app.config.model_sources import sound_name
from serve_app.config.settings import ModelSettings, canonical_name
from serve_app.gateway.model_registry import ON_DEMAND
from serve_app.gateway.schedulability import Schedulability
from serve_app.on_demand.definitions import base_from_request, base_from_settings
from serve_app.on_demand.processes import PoolDirectory
from serve_app.on_demand.report import OperationProgress

POLL_S = 0.2
PIECE_BYTES = 4 << 20
PIECE_S = 15.0
PROCESS_LOST = "a process with models on demand ended or hung during the operation; try again"


class ModelManagement:
    """Executes clients' requests to change the models on demand.

    Models of the configuration (`configured`) cannot be changed. Their names take precedence over
    equal names in a store. `start_timeout_s`: how long an operation may wait for a process; then it
    raises OverloadedError, and ModelUnavailableError as soon as no node can host one.
    """

    def __init__(
        self,
        pool: PoolDirectory,
        configured: Iterable[ModelSettings],
        *,
        start_timeout_s: float,
        schedulability: Schedulability | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._start_timeout_s = start_timeout_s
        self._schedulability = schedulability
        self._clock = clock
        self._configured = {canonical_name(model.name): model for model in configured}

    def base_of(self, text: str) -> Definition:
        """The base of a new model that a request names. RequestError if it names none."""
        model = self._configured.get(canonical_name(text))
        return base_from_request(text) if model is None else base_from_settings(model)

    async def pull(
        self, name: str, *, insecure: bool = False
    ) -> AsyncGenerator[PullProgress, None]:
        """The progress of the slowest store. Closing the generator cancels the pull, unless other
        clients have joined it.

        A configured model succeeds at once: clients pull a model to be sure that it is present.
        """
        if canonical_name(name) in self._configured:
            yield PullProgress("success")
            return
        async for step in self._progress("pull", name, insecure):
            yield step

    async def push(
        self, name: str, *, insecure: bool = False
    ) -> AsyncGenerator[PullProgress, None]:
        """The progress of a push from one of the stores that have the model. Closing the generator
        cancels the push, unless other clients have joined it."""
        if canonical_name(name) in self._configured:
            raise RequestError(
                f"model '{name}' is part of the configuration; models of the store can be pushed"
            )
        sound_name(name)
        id = uuid.uuid4().hex
        store = await self._store_that_pushes(id, name, insecure)
        async for step in self._followed(id, [store]):
            yield step

    async def create(self, name: str, definition: Definition) -> AsyncGenerator[PullProgress, None]:
        """The progress of the slowest store; `definition`'s base as `base_of` returns it."""
        self._refuse_configured(name)
        sound_name(name)
        sources = {base_from_settings(model).base for model in self._configured.values()}
        async for step in self._progress("create", name, definition, definition.base in sources):
            yield step

    async def copy(self, source: str, destination: str) -> None:
        """Copies the model in every store that has it. ModelNotFoundError if none has it.

        A configured model becomes a model of every store, which may have to copy its files.
        """
        self._refuse_configured(destination)
        sound_name(destination, f'destination "{destination}" is invalid')
        if canonical_name(source) in self._configured:
            async for _ in self.create(destination, self.base_of(source)):
                pass
            return
        sound_name(source, f'source "{source}" is invalid')
        await self._call_holders("copy", source, destination)
        self._pool.forget()

    async def delete(self, name: str) -> None:
        """Removes the model from every store and unloads it from every process, after its running
        requests. ModelNotFoundError if no store has it.

        Its files are removed at once if it is idle, else by a later `sweep`.
        """
        self._refuse_configured(name)
        sound_name(name, f'name "{name}" is invalid')
        try:
            holders = await self._call_holders("remove", name)
        finally:  # afterwards, so that no request loads it again
            self._pool.forget()
            await self._pool.unload(name)
        await self._pool.call(holders, "remove_unmapped")

    async def has_blob(self, digest: str) -> bool:
        """Whether every store has the blob."""
        return all(await self._call(await self._store_replicas(), "has_blob", digest))

    async def upload(
        self, digest: str, size: int | None, content: AsyncIterable[bytes], *, tenant: str
    ) -> bool:
        """Writes the blob into every store; False if all had it already.

        An upload that ends early, e.g. because the client disconnects, is removed.
        """
        if await self.has_blob(digest):
            return False
        replicas, id, offset = await self._store_replicas(), uuid.uuid4().hex, 0
        try:
            await self._call(replicas, "uploads.begin", id, digest, size, tenant)
            async for piece in _pieces(content, self._clock):
                await self._call(replicas, "uploads.append", id, offset, piece)
                offset += len(piece)
            await self._call(replicas, "uploads.finish", id)
        except BaseException:
            with suppress(Exception):  # an upload that is not aborted is dropped later
                await asyncio.shield(self._pool.call(replicas, "uploads.abort", id))
            raise
        return True

    async def _progress(self, method: str, *arguments: Any) -> AsyncGenerator[PullProgress, None]:
        """Runs an operation in every store that can; yields the steps of the slowest one.

        The slowest store may change, so a step may be reported again with fewer bytes.
        """
        id = uuid.uuid4().hex
        try:
            replicas = await self._call_holders(method, id, *arguments)
            async for step in self._followed(id, replicas):
                yield step
        finally:
            self._pool.forget()

    async def _followed(
        self, id: str, replicas: Sequence[str]
    ) -> AsyncGenerator[PullProgress, None]:
        """The steps of the slowest process in which the operation runs; at the end, those of the
        one with the most steps, so that the last step is always among them."""
        seen, last = 0, None
        while True:
            reports = await self._call(replicas, "operations.follow", id, max(0, seen - 1))
            slowest = min(reports, key=_position)
            if slowest.done:
                slowest = max(reports, key=_position)
            seen = max(seen, slowest.count)
            for step in slowest.steps:
                if step != last:
                    yield step
                last = step
            if slowest.done:
                return
            await asyncio.sleep(POLL_S)

    async def _store_replicas(self) -> list[str]:
        """One process for each store; waits until there is one."""
        schedulable: AbstractAsyncContextManager[None] = nullcontext()
        if self._schedulability is not None:
            schedulable = self._schedulability.wait_schedulable(ON_DEMAND)
        try:
            async with asyncio.timeout(self._start_timeout_s), schedulable:
                return await self._pool.store_replicas()
        except TimeoutError:
            raise OverloadedError(
                f"no process with models on demand has answered within {self._start_timeout_s:g} "
                "seconds"
            ) from None

    async def _call(self, replicas: Sequence[str], method: str, *arguments: Any) -> list[Any]:
        """The value of each. Raises the error of any; OverloadedError if a process is lost."""
        results = await self._pool.call(replicas, method, *arguments)
        values = [result.result() for result in results]
        if len(results) != len(replicas):
            raise OverloadedError(PROCESS_LOST)
        return values

    async def _call_holders(self, method: str, *arguments: Any) -> list[str]:
        """Calls every store; returns the replicas of those that did not raise ModelNotFoundError.

        Raises that error if all did.
        """
        replicas = await self._store_replicas()
        results = await self._pool.call(replicas, method, *arguments)
        if len(results) != len(replicas):
            raise OverloadedError(PROCESS_LOST)
        found, missing = [], None
        for result in results:
            try:
                result.result()
                found.append(result.replica)
            except ModelNotFoundError as error:
                missing = error
        if missing is not None and not found:
            raise missing
        return found

    async def _store_that_pushes(self, id: str, name: str, insecure: bool) -> str:
        """Starts the push in the first store that has the model, and returns its replica. Raises
        ModelNotFoundError if none has it."""
        replicas = await self._store_replicas()
        for left, replica in zip(reversed(range(len(replicas))), replicas, strict=True):
            try:
                await self._call([replica], "push", id, name, insecure)
                return replica
            except ModelNotFoundError:
                if not left:
                    raise
        raise OverloadedError(PROCESS_LOST)

    def _refuse_configured(self, name: str) -> None:
        if canonical_name(name) in self._configured:
            raise RequestError(
                f"model '{name}' is part of the configuration and can only be changed there"
            )


def _position(report: OperationProgress) -> tuple[bool, int, int]:
    """Orders reports from the slowest to the fastest."""
    return report.done, report.count, report.steps[-1].completed if report.steps else 0


async def _pieces(
    content: AsyncIterable[bytes], clock: Callable[[], float]
) -> AsyncGenerator[bytes, None]:
    """The same bytes in pieces of `PIECE_BYTES`. Smaller pieces are sent after `PIECE_S`, because
    uploads without progress are dropped."""
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
