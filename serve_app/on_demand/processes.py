"""The processes with models on demand, as an ingress knows them: who has what, who is asked."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

from model_zoo.store.model_name import ModelName
from runtime.errors import ModelNotFoundError, OverloadedError, SourceError
from serve_app.gateway.listing import ListedModel, LoadedModel
from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import Task
from serve_app.on_demand.commands import Answer, Command, Describe, Listing, Load, Unload
from serve_app.on_demand.process_choice import place
from serve_app.on_demand.report import PoolReport
from serve_app.transport.wire import Address

# How old what is known may be: for a request whose model is known to be loaded, for any other, and
# for what somebody wants to know now.
STALE_S = 10.0
FRESH_S = 1.0
NOW_S = 0.05
# An unknown name may be a new one, but is not looked for more often than this.
MISSED_S = 0.5
# A model that was sent somewhere goes there again, until it is told where it is.
SENT_S = 30.0
REPORT_TIMEOUT_S = 5.0
# The model may be what ends them.
MOST_ASKED = 2


class Everyone(Protocol):
    """All processes; see serve_app.gateway.replica_calls.Replicas."""

    async def ask(self, method: str, *arguments: Any, timeout_s: float | None) -> list[Any]: ...

    async def await_one(self) -> None: ...


class PoolDirectory:
    """Knows the processes, the models in their stores, and where each model is loaded."""

    def __init__(self, everyone: Everyone) -> None:
        self._everyone = everyone
        self._asking = asyncio.Lock()
        self._reports: list[PoolReport] = []
        self._reported_at = float("-inf")
        self._listed: dict[str, dict[str, ListedModel]] = {}  # by store, then by name in lower case
        self._versions: dict[str, str] = {}
        self._listed_at = float("-inf")
        self._sent: dict[str, tuple[str, float]] = {}
        self._refreshing: asyncio.Task[None] | None = None

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address:
        """Where the task goes; waits until there is a process that can take it."""
        report, model = await self._placed(task.model, avoid)
        return dataclasses.replace(report.address, model=model.digest)

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        return await self._asked(model, Describe(model, verbose))

    async def load(self, model: str, keep_alive_s: float | None, *, tenant: str = "") -> None:
        await self._asked(model, Load(model, keep_alive_s, tenant))
        self.forget()

    async def unload(self, model: str) -> None:
        """Wherever it is loaded."""
        replicas = [report.replica for report in await self._recent(NOW_S)]
        for answer in await self.order(replicas, Unload(model)):
            answer.result()
        self.forget()

    async def find(self, name: str) -> ListedModel | None:
        """The model of that name, whatever its case; None when no store has it.

        Waits like `know_stores`.
        """
        try:
            key = str(ModelName.parse(name)).lower()
        except SourceError:
            return None
        await self.know_stores()
        found = self._known(key)
        age = time.monotonic() - self._listed_at
        if age > (STALE_S if found else MISSED_S):
            await self._refresh()
            return self._known(key)
        if age > FRESH_S:
            self._refresh_soon()
        return found

    async def know_stores(self) -> None:
        """Waits for the first process there ever is: until then nothing is known of the stores."""
        if not self._versions:
            await self.processes()

    async def listed(self) -> list[ListedModel]:
        """Every model that some process can load."""
        await self._refresh()
        return self.last_listed

    @property
    def last_listed(self) -> list[ListedModel]:
        return [*{m.name: m for models in self._listed.values() for m in models.values()}.values()]

    async def loaded(self) -> list[LoadedModel]:
        reports = await self._recent(0)
        return [resident.loaded for report in reports for resident in report.residents]

    async def processes(self) -> list[PoolReport]:
        """Those that are there; waits until one is."""
        while not (reports := await self._recent(NOW_S)):
            await self._await_one()
        return reports

    async def store_managers(self) -> list[str]:
        """One process for each store: what it does to its store is done for all that share it."""
        return [*{report.store: report.replica for report in await self.processes()}.values()]

    async def order(self, replicas: Sequence[str], command: Command) -> list[Answer]:
        """What these processes answer; those that are gone do not."""
        answers = await self._everyone.ask("order", tuple(replicas), command, timeout_s=None)
        return [answer for answer in answers if isinstance(answer, Answer)]

    def forget(self) -> None:
        """Things have changed: what is known has to be asked anew."""
        self._reported_at = self._listed_at = float("-inf")

    def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()

    async def _placed(self, name: str, avoid: frozenset[str]) -> tuple[PoolReport, ListedModel]:
        while True:
            found = await self.find(name)
            if found is None:
                raise ModelNotFoundError(f"model '{name}' not found")
            report = await self._place(found, avoid)
            if report is not None:
                return report, found
            await self._await_one()

    async def _await_one(self) -> None:
        await self._everyone.await_one()
        self.forget()
        await asyncio.sleep(NOW_S)  # who is there is not always asked at once

    async def _place(self, model: ListedModel, avoid: frozenset[str]) -> PoolReport | None:
        """None: no process is there that could take it."""
        age = time.monotonic() - self._reported_at
        known = [report for report in self._reports if report.replica not in avoid]
        holds = any(report.resident(model.name) for report in known)
        if not holds or avoid or age > STALE_S:
            await self._recent(NOW_S if avoid else FRESH_S)
        elif age > FRESH_S:
            self._refresh_soon()
        key = model.name.lower()
        able = [r for r in self._reports if key in self._listed.get(r.store, {})]
        if not able:
            return None
        chosen = self._sent_before(model, able, avoid) or place(able, model, avoid=avoid)
        self._sent[model.name] = (chosen.replica, time.monotonic())
        return chosen

    def _sent_before(
        self, model: ListedModel, able: Sequence[PoolReport], avoid: frozenset[str]
    ) -> PoolReport | None:
        """While nobody is known to have it: requests at the same time do not load it twice."""
        if any(report.resident(model.name) for report in able):
            return None
        replica, sent_at = self._sent.get(model.name, ("", float("-inf")))
        if replica in avoid or time.monotonic() - sent_at > SENT_S:
            return None
        return next((report for report in able if report.replica == replica), None)

    async def _asked(self, model: str, command: Command) -> Any:
        """By the process where a task for the model would go; the next one where that ends."""
        avoid: frozenset[str] = frozenset()
        for _ in range(MOST_ASKED):
            report, _ = await self._placed(model, avoid)
            answers = await self.order([report.replica], command)
            if answers:
                return answers[0].result()
            self.forget()
            avoid |= {report.replica}
        raise OverloadedError(
            f"{MOST_ASKED} processes with models on demand have ended while they were asked for "
            f"model '{model}'; try again"
        )

    async def _recent(self, at_most_s: float) -> list[PoolReport]:
        """Reports of that age; whoever waits for them shares them."""
        wanted = time.monotonic() - at_most_s
        async with self._asking:
            if self._reported_at < wanted:
                await self._ask_reports()
        return self._reports

    async def _ask_reports(self) -> None:
        before, self._reported_at = self._reported_at, time.monotonic()
        try:
            told = await self._everyone.ask("report", timeout_s=REPORT_TIMEOUT_S)
        except TimeoutError:
            return  # what was known is better than nothing
        except asyncio.CancelledError:
            self._reported_at = before  # whoever wanted it has left; the others still want it
            raise
        self._reports = [report for report in told if isinstance(report, PoolReport)]

    async def _refresh(self) -> None:
        """The lists of all stores that have changed."""
        begun = time.monotonic()
        reports = await self._recent(NOW_S)
        versions = {report.store: report.listing for report in reports}
        changed = {s for s, version in versions.items() if self._versions.get(s) != version}
        by_store = {report.store: report.replica for report in reports}
        answers = await self.order([by_store[s] for s in changed], Listing()) if changed else []
        told = {answer.replica: answer.value for answer in answers if answer.failed is None}
        fresh = {
            store: {model.name.lower(): model for model in told[by_store[store]]}
            for store in changed
            if by_store[store] in told
        }
        if reports:
            kept = {s: models for s, models in self._listed.items() if s in versions}
            self._listed = {**kept, **fresh}
            known = {s: v for s, v in self._versions.items() if s in versions}
            self._versions = {**known, **{store: versions[store] for store in fresh}}
        self._listed_at = begun

    def _refresh_soon(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())

    def _known(self, key: str) -> ListedModel | None:
        return next((models[key] for models in self._listed.values() if key in models), None)
