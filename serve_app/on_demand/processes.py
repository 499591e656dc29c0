"""An ingress's view of the processes with models on demand."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from model_zoo.store.model_name import ModelName
from runtime.errors import ModelNotFoundError, OverloadedError, ReplicaLostError, SourceError
from serve_app.config.model_sources import sound_name
from serve_app.logs import get_logger
from serve_app.messages.listing import ListedModel, LoadedModel
from serve_app.messages.model_card import ModelCard
from serve_app.messages.replica_status import ReplicaStatus
from serve_app.messages.tasks import Task
from serve_app.on_demand.process_choice import choose_process
from serve_app.on_demand.process_reports import ProcessReports
from serve_app.on_demand.report import CallResult, PoolReport
from serve_app.routing.replica_calls import NamedReplicaCalls
from serve_app.transport.wire import Address

# Maximum age of reports: for a request whose model is known to be loaded, for other requests, and
# for callers that need the current state.
STALE_S = 10.0
FRESH_S = 1.0
NOW_S = 0.05
# Maximum age of the lists, which have the options of each model, for a request whose model is
# listed. Older than `LIST_FRESH_S`, they are refreshed behind it, so that none waits while many
# come.
LIST_STALE_S = 1.0
LIST_FRESH_S = 0.5
# An unknown name may be a new model, but is not looked up more often than this.
UNKNOWN_NAME_S = 0.5
# Requests for a model follow the first one to its process for up to this long, until a report shows
# the model.
STICKY_S = 30.0
# During a call its process must answer this often.
CHECK_S = 5.0
# Limited, because the model itself may be the cause of the processes' end.
MAX_PROCESSES_TRIED = 2

log = get_logger()


class PoolDirectory:
    """Knows the processes, the models in their stores, and where each model is loaded."""

    def __init__(self, processes: NamedReplicaCalls) -> None:
        self._processes = processes
        self._reports = ProcessReports(processes)
        self._listed: dict[str, dict[str, ListedModel]] = {}  # by store, then by name in lower case
        self._versions: dict[str, str] = {}
        self._unlisted: CallResult | None = None  # of a store that cannot be read
        self._listed_at = self._valid_from = float("-inf")
        self._sent: dict[str, tuple[str, float]] = {}
        # Calls of `ModelPool.version` by process and digest, which are also the known results.
        self._contexts: dict[tuple[str, str], asyncio.Task[CallResult | None]] = {}
        self._refreshing: asyncio.Task[None] | None = None

    async def choose(
        self, task: Task, *, avoid: frozenset[str] = frozenset(), identity: str | None = None
    ) -> Address:
        """The process for the task; waits until there is one that can load the model.

        `Address.model` is equal for processes that serve the same version with the same context.
        Processes in `avoid` are chosen only if there is no other, and after them those of another
        `identity`, if one is stated.
        """
        unable: frozenset[str] = frozenset()
        while True:
            report, model = await self._choose(task.model, avoid, unable)
            found = await self._identity(report, model)
            if found is None and report.replica not in avoid:
                self.forget()
                avoid |= {report.replica}
            elif identity in (None, found) or report.replica in unable:
                return dataclasses.replace(report.address, model=found or "")
            else:
                unable |= {report.replica}

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        return await self._call_for(model, "pool.describe", model, verbose)

    async def load(self, model: str, keep_alive_s: float | None, *, tenant: str = "") -> None:
        await self._call_for(model, "pool.load", model, keep_alive_s, tenant)
        self.forget()

    async def unload(self, model: str) -> None:
        """Unload the model from every process that has loaded it, after its running requests."""
        replicas = [report.replica for report in await self._reports.newest(NOW_S)]
        for result in await self.call(replicas, "pool.unload", str(sound_name(model))):
            result.result()
        self.forget()

    async def find(self, name: str) -> ListedModel | None:
        """The model of that name, in any case of letters; None if no store has it. Raises the
        error of a store that cannot be read, unless another one has the model.

        Waits like `wait_for_stores`.
        """
        try:
            key = str(ModelName.parse(name)).lower()
        except SourceError:
            return None
        await self.wait_for_stores()
        found = self._listed_model(key)
        age = self._list_age_s
        if age > (LIST_STALE_S if found else UNKNOWN_NAME_S):
            await self._refresh()
            found = self._listed_model(key)
        elif age > LIST_FRESH_S:
            self._refresh_soon()
        if found is None and self._unlisted is not None:
            self._unlisted.result()
        return found

    async def wait_for_stores(self) -> None:
        """Waits until the first process has reported its store."""
        if not self._versions:
            await self.reports()

    async def listed(self) -> list[ListedModel]:
        """Every model that a process can load."""
        await self._refresh()
        return self.last_listed

    @property
    def last_listed(self) -> list[ListedModel]:
        return [*{m.name: m for models in self._listed.values() for m in models.values()}.values()]

    async def loaded(self) -> list[LoadedModel]:
        reports = await self._reports.newest(0)
        return [resident.loaded for report in reports for resident in report.residents]

    async def reports(self) -> list[PoolReport]:
        """Reports of all processes that do not hang; waits until there is one."""
        while not (reports := await self._reports.newest(NOW_S)):
            await self._await_process()
        return reports

    async def store_replicas(self) -> list[str]:
        """One process for each store: it changes the store for all that share it."""
        return [*{report.store: report.replica for report in await self.reports()}.values()]

    async def call(self, replicas: Sequence[str], method: str, *arguments: Any) -> list[CallResult]:
        """Calls `method` of these processes' `StoreManager`; those that are lost or hang have no
        result."""
        calls = (self._call(replica, method, *arguments) for replica in replicas)
        return [result for result in await asyncio.gather(*calls) if result is not None]

    async def statuses(self) -> list[ReplicaStatus]:
        """Those of the processes that do not hang."""
        replicas = [report.replica for report in await self._reports.newest(FRESH_S)]
        results = await self.call(replicas, "status")
        return [result.value for result in results if result.failed is None]

    def forget(self) -> None:
        """Mark reports and lists as outdated: the next caller requests new ones."""
        self._reports.forget()
        self._valid_from = _now()

    def close(self) -> None:
        self._reports.close()
        for calling in (*self._contexts.values(), self._refreshing):
            if calling is not None:
                calling.cancel()

    async def _identity(self, report: PoolReport, model: ListedModel) -> str | None:
        """The version and the context with which the process serves the model, or would load it:
        that depends on its settings and memory, but never changes. None if it is lost or hangs."""
        digest = self._listed[report.store][model.name.lower()].digest
        resident = report.resident(model.name)
        if resident is not None and resident.loaded.model.digest == digest:
            return _identity_of(digest, resident.loaded.model.context_tokens)
        key = report.replica, digest
        if key not in self._contexts:
            names = set(self._processes.names)
            self._contexts = {k: call for k, call in self._contexts.items() if k[0] in names}
            self._contexts[key] = asyncio.create_task(self._ask_version(key, model.name))
        result = await asyncio.shield(self._contexts[key])  # which others may wait for
        return None if result is None else _identity_of(*result.result())

    async def _ask_version(self, key: tuple[str, str], name: str) -> CallResult | None:
        """The result is kept if the process has the version that its store lists."""
        replica, digest = key
        result = None
        try:
            result = await self._call(replica, "pool.version", name)
        finally:
            if result is None or result.failed is not None or result.value[0] != digest:
                self._contexts.pop(key, None)
        return result

    async def _choose(
        self, name: str, avoid: frozenset[str], unable: frozenset[str] = frozenset()
    ) -> tuple[PoolReport, ListedModel]:
        while True:
            found = await self.find(name)
            if found is None:
                raise ModelNotFoundError(f"model '{name}' not found")
            report = await self._choose_among_known(found, avoid, unable)
            if report is not None:
                return report, found
            await self._await_process()

    async def _await_process(self) -> None:
        """Waits for another process, or another state of those that run. ModelUnavailableError if
        they cannot load models."""
        self._reports.check()
        await self._processes.await_one()
        self.forget()
        await asyncio.sleep(NOW_S)  # Serve may not list a process that has just started

    async def _choose_among_known(
        self, model: ListedModel, avoid: frozenset[str], unable: frozenset[str]
    ) -> PoolReport | None:
        """None if no process can load the model."""
        age_s = self._reports.age_s
        known = [report for report in self._reports.reports if report.replica not in avoid]
        resident = any(report.resident(model.name) for report in known)
        if not resident or avoid or age_s > STALE_S:
            await self._reports.newest(NOW_S if avoid else FRESH_S)
        elif age_s > FRESH_S:
            self._refresh_soon()
        key = model.name.lower()
        able = [r for r in self._reports.reports if key in self._listed.get(r.store, {})]
        if not able:
            return None
        chosen = self._chosen_before(model, able, avoid | unable)
        chosen = chosen or choose_process(able, model, avoid=avoid, unable=unable)
        self._sent[model.name] = (chosen.replica, _now())
        return chosen

    def _chosen_before(
        self, model: ListedModel, able: Sequence[PoolReport], avoid: frozenset[str]
    ) -> PoolReport | None:
        """The process of an earlier request for a model that no report shows yet, so that
        concurrent requests do not load it twice."""
        if any(report.resident(model.name) for report in able):
            return None
        replica, sent_at = self._sent.get(model.name, ("", float("-inf")))
        if replica in avoid or _now() - sent_at > STICKY_S:
            return None
        return next((report for report in able if report.replica == replica), None)

    async def _call_for(self, model: str, method: str, *arguments: Any) -> Any:
        """Calls the process that a task for the model would be sent to; another one if it is lost
        or hangs."""
        avoid: frozenset[str] = frozenset()
        for _ in range(MAX_PROCESSES_TRIED):
            report, _ = await self._choose(model, avoid)
            results = await self.call([report.replica], method, *arguments)
            if results:
                return results[0].result()
            self.forget()
            avoid |= {report.replica}
        raise OverloadedError(
            f"{MAX_PROCESSES_TRIED} processes with models on demand ended or hung during calls for "
            f"model '{model}'; try again"
        )

    async def _call(self, replica: str, method: str, *arguments: Any) -> CallResult | None:
        """None if the process is lost or hangs. The call itself may take as long as a load."""
        calling = asyncio.create_task(self._processes.call(replica, "call", method, *arguments))
        try:
            while not (await asyncio.wait({calling}, timeout=CHECK_S))[0]:
                if not await self._reports.answers(replica):
                    log.warning("call not answered", replica=replica, method=method)
                    return None
            result: CallResult = calling.result()
            return result
        except ReplicaLostError:
            return None
        finally:
            calling.cancel()

    async def _refresh(self) -> None:
        """Requests the lists of all stores that have changed. They are dropped if lists that were
        requested later have arrived earlier."""
        begun = _now()
        reports = await self._reports.newest(NOW_S)
        versions = {report.store: report.listing for report in reports}
        replicas = {
            report.replica: report.store
            for report in {report.store: report for report in reports}.values()
            if self._versions.get(report.store) != report.listing
        }
        results = await self.call([*replicas], "models.listed")
        if begun < self._listed_at:
            return
        self._unlisted = next((each for each in results if each.failed is not None), None)
        fresh = {
            replicas[result.replica]: {model.name.lower(): model for model in result.value}
            for result in results
            if result.failed is None
        }
        if reports:
            kept = {s: models for s, models in self._listed.items() if s in versions}
            self._listed = {**kept, **fresh}
            known = {s: v for s, v in self._versions.items() if s in versions}
            self._versions = {**known, **{store: versions[store] for store in fresh}}
        self._listed_at = begun

    @property
    def _list_age_s(self) -> float:
        """The time since the lists were requested; infinite if they are outdated."""
        outdated = self._listed_at < self._valid_from
        return float("inf") if outdated else _now() - self._listed_at

    def _refresh_soon(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())

    def _listed_model(self, key: str) -> ListedModel | None:
        return next((models[key] for models in self._listed.values() if key in models), None)


def _identity_of(digest: str, context_tokens: int) -> str:
    return f"{digest} {context_tokens}"


def _now() -> float:
    """Seconds on the clock of the event loop, as in reports."""
    return asyncio.get_running_loop().time()
