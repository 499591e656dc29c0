"""The newest report of each process with models on demand, which are asked one by one."""

import asyncio
from dataclasses import dataclass

from runtime.errors import CaravanError, ModelUnavailableError
from serve_app.logs import get_logger
from serve_app.on_demand.report import PoolReport
from serve_app.routing.replica_calls import NamedReplicaCalls
from serve_app.transport.client import SILENCE_S

# How long callers wait for the report of a process; then they use its previous one.
PATIENCE_S = 1.0

log = get_logger()


@dataclass(slots=True, eq=False)
class _Process:
    """What is known of one process.

    `refusal`: why it has no report and cannot load models. `reported_at`, `asked_at`: when the
    newest report or refusal and the awaited one were requested. `asking`: awaits a report. `hangs`:
    the latest request was not answered in time. `lost`: it has ended.
    """

    name: str
    report: PoolReport | None = None
    refusal: str | None = None
    reported_at: float = float("-inf")
    asked_at: float = 0.0
    asking: asyncio.Task[None] | None = None
    hangs: bool = False
    lost: bool = False

    @property
    def slow(self) -> bool:
        late = self.asking is not None and _now() - self.asked_at >= PATIENCE_S
        return late or self.hangs


class ProcessReports:
    """Requests reports of `processes` and shares them among concurrent callers.

    A process that does not report for `SILENCE_S` hangs: it has no report until it answers, and no
    caller waits for it.
    """

    def __init__(self, processes: NamedReplicaCalls) -> None:
        self._processes = processes
        self._known: dict[str, _Process] = {}
        self._requested_at = self._valid_from = float("-inf")
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def reports(self) -> list[PoolReport]:
        """The newest report of each process that does not hang."""
        found = (each.report for each in self._known.values() if not each.hangs)
        return [report for report in found if report is not None]

    @property
    def age_s(self) -> float:
        """The time since the reports were last brought up to date."""
        return _now() - self._requested_at

    def check(self) -> None:
        """ModelUnavailableError with the reason if no process reports and one cannot load models,
        which a later one may."""
        refusals = (each.refusal for each in self._known.values())
        refusal = next((each for each in refusals if each is not None), None)
        if refusal is not None and not self.reports:
            raise ModelUnavailableError(refusal)

    async def newest(self, max_age_s: float) -> list[PoolReport]:
        """Reports of at most that age, or older ones of slow processes."""
        begun = _now()
        since = max(begun - max_age_s, self._valid_from)
        self._follow_list()
        stale = [each for each in self._known.values() if each.reported_at < since]
        prompt = [each for each in stale if not each.slow]
        for each in stale:
            self._ask(each)
        updates = {asyncio.create_task(self._updated(each, since)) for each in prompt}
        try:
            if updates:
                await asyncio.wait(updates, timeout=PATIENCE_S)
            if not self.reports:
                await self._any_report()
        finally:
            for update in updates:
                update.cancel()
        self._requested_at = begun if begun >= self._valid_from else self._requested_at
        return self.reports

    async def answers(self, name: str) -> bool:
        """Whether the process answers a request for its report within `SILENCE_S`."""
        process = self._known.get(name)
        if process is None:
            return False
        await self._updated(process, _now())
        return not process.lost and not process.hangs

    def forget(self) -> None:
        """The next caller requests new reports."""
        self._requested_at, self._valid_from = float("-inf"), _now()

    def close(self) -> None:
        for asking in self._asking:
            asking.cancel()

    def _follow_list(self) -> None:
        names = set(self._processes.names)
        for name in self._known.keys() - names:
            self._known.pop(name).lost = True
        for name in names - self._known.keys():
            self._known[name] = _Process(name)

    async def _updated(self, process: _Process, since: float) -> None:
        """Waits for a report that was requested since then; not for that of a process that
        hangs."""
        while process.reported_at < since and not process.lost:
            await asyncio.wait({self._ask(process)})
            if process.hangs:
                return

    async def _any_report(self) -> None:
        asking = {each.asking for each in self._known.values() if each.asking is not None}
        if asking:
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)

    def _ask(self, process: _Process) -> asyncio.Task[None]:
        """The request for a report that runs, or a new one. It outlives its callers: others may
        wait for it."""
        if process.asking is None:
            process.asked_at = _now()
            process.asking = asyncio.create_task(self._request(process))
            self._asking.add(process.asking)
            process.asking.add_done_callback(self._asking.discard)
        return process.asking

    async def _request(self, process: _Process) -> None:
        asked_at = process.asked_at
        try:
            async with asyncio.timeout(SILENCE_S):
                report: PoolReport = await self._processes.call(process.name, "report")
            process.report, process.refusal = report, None
            process.reported_at, process.hangs = asked_at, False
        except ModelUnavailableError as error:
            process.report, process.refusal = None, str(error)
            process.reported_at, process.hangs = asked_at, False
        except TimeoutError:
            if not process.hangs:
                log.warning("process with models on demand hangs", replica=process.name)
            process.hangs = True
        except CaravanError as error:
            log.debug("process with models on demand lost", reason=str(error))
            process.lost = True
            if self._known.get(process.name) is process:
                del self._known[process.name]
        finally:
            process.asking = None


def _now() -> float:
    """Seconds on the clock of the event loop, which timeouts use too."""
    return asyncio.get_running_loop().time()
