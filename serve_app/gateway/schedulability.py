"""Which deployments have no place in the cluster, so that their requests are told so at once."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from runtime.errors import ModelUnavailableError
from serve_app.gateway.listing import ListedModel
from serve_app.logs import get_logger

LOOK_S = 2.0
CALM_LOOK_S = 10.0

Resources = Mapping[str, float]

log = get_logger()


@dataclass(frozen=True, slots=True)
class Need:
    """What a replica of a deployment needs: each bundle on one node, `together` all on the same,
    `apart` each on another.

    `what`: how people call it, such as "model llama3.2:1b".
    """

    what: str
    deployment: str
    bundles: tuple[Resources, ...]
    together: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """The cluster at a moment: the resources of each node, those free in all, and by deployment the
    replicas that run, those that are starting, and what Serve says of it."""

    nodes: Sequence[Resources] = ()
    free: Resources = field(default_factory=dict)
    running: Mapping[str, int] = field(default_factory=dict)
    starting: Mapping[str, int] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was known when the application was built: what each model needs, by its name, and what
    its files say, where they were there to be looked at. `encoders`: under which name their need
    is, of each model that has its images encoded by others."""

    needs: Mapping[str, Need] = field(default_factory=dict)
    known: Mapping[str, ListedModel] = field(default_factory=dict)
    encoders: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    """May fail when the cluster has other worries."""

    async def look(self) -> View: ...


class Schedulability:
    """Looks at the cluster now and then; `needs` by the name under which tasks ask."""

    def __init__(self, needs: Mapping[str, Need], cluster: Cluster) -> None:
        self._needs = needs
        self._cluster = cluster
        self._problems: dict[str, str] = {}
        self._waiting: dict[str, set[asyncio.Timeout]] = {name: set() for name in needs}

    def problem(self, name: str) -> str | None:
        """Why no replica can be started, as far as is known."""
        return self._problems.get(name)

    def refuse(self, name: str) -> None:
        """ModelUnavailableError where there is such a reason."""
        problem = self._problems.get(name)
        if problem is not None:
            raise ModelUnavailableError(problem)

    @asynccontextmanager
    async def schedulable(self, name: str) -> AsyncIterator[None]:
        """Raises ModelUnavailableError as soon as no node can host a replica."""
        self.refuse(name)
        patience = asyncio.timeout(None)
        waiting = self._waiting.setdefault(name, set())
        waiting.add(patience)
        try:
            async with patience:
                yield
        except TimeoutError:
            if patience.expired():
                self.refuse(name)
            raise
        finally:
            waiting.discard(patience)

    async def watch(self) -> None:
        """For as long as the process lives."""
        while True:
            try:
                view = await self._cluster.look()
                self.note(view)
                calm = all(view.running.get(n.deployment) for n in self._needs.values())
            except Exception as error:
                calm = False
                reason = f"{type(error).__name__}: {error}"[:300]
                log.info("the cluster cannot be looked at", reason=reason)
            await asyncio.sleep(CALM_LOOK_S if calm else LOOK_S)

    def note(self, view: View) -> None:
        for name, need in self._needs.items():
            problem = problem_of(need, view)
            before = self._problems.pop(name, None)
            if problem is None:
                if before is not None:
                    log.info("no more without a place", deployment=need.deployment)
                continue
            self._problems[name] = problem
            if problem != before:
                log.error("without a place", deployment=need.deployment, reason=problem)
            now = asyncio.get_running_loop().time()
            for patience in self._waiting[name]:
                patience.reschedule(now)


def problem_of(need: Need, view: View) -> str | None:
    """Why no replica can be started now; None where one runs or may yet start.

    Of a model that sleeps nothing is told: to wake it is what makes an autoscaler add nodes.
    """
    if view.running.get(need.deployment) or not view.nodes:
        return None
    if view.starting.get(need.deployment) and not _fits(need, view.nodes):
        return (
            f"{need.what} has no place: a replica needs {_needed(need)}; of the cluster's "
            f"{len(view.nodes)} nodes the largest have {_largest(need, view.nodes)}. It starts as "
            "soon as there is room, such as a node that an autoscaler adds, whose kinds are not "
            "known here; or let it need less (`num_gpus`, `num_cpus`, `parallel`)."
        )
    told = view.told.get(need.deployment, "")
    # Serve says the same of a process that is slow to start, so there has to be too little free.
    lacking = any(not _holds(view.free, bundle) for bundle in need.bundles)
    if view.starting.get(need.deployment) and "to be scheduled" in told and lacking:
        free = _said({name: view.free.get(name, 0.0) for name in _names(need)})
        return (
            f"{need.what} waits for a place: a replica needs {_needed(need)}; free in the whole "
            f"cluster are {free}. Others have the rest; stop one of them, or add a node."
        )
    if "failed" in told.lower() and not view.starting.get(need.deployment):
        return f"{need.what} could not be started: {told.strip().splitlines()[-1][:500]}"
    return None


def _fits(need: Need, nodes: Sequence[Resources]) -> bool:
    """Whether the bundles would find places on the nodes if these were empty, the largest first."""
    rooms = [dict(node) for node in nodes]
    bundles = [_sum(need.bundles)] if need.together else list(need.bundles)
    for bundle in sorted(bundles, key=lambda each: sorted(each.values(), reverse=True)):
        room = next((room for room in rooms if _holds(room, bundle)), None)
        if room is None:
            return False
        for name, count in bundle.items():
            room[name] = room.get(name, 0.0) - count
        if need.apart:
            room.clear()
    return True


def _holds(room: Resources, bundle: Resources) -> bool:
    return all(room.get(name, 0.0) >= count for name, count in bundle.items() if count)


def _sum(bundles: Sequence[Resources]) -> dict[str, float]:
    names = {name for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _names(need: Need) -> list[str]:
    return sorted({name for bundle in need.bundles for name, count in bundle.items() if count})


def _needed(need: Need) -> str:
    if len(need.bundles) == 1:
        return f"{_said(need.bundles[0])} on one node"
    where = "each on a node of its own" if need.apart else "each on one node"
    where = "on one node" if need.together else where
    return f"{len(need.bundles)} times {_said(need.bundles[0])}, {where}"


def _largest(need: Need, nodes: Sequence[Resources]) -> str:
    return _said({name: max(node.get(name, 0.0) for node in nodes) for name in _names(need)})


def _said(resources: Resources) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in sorted(resources.items()))
