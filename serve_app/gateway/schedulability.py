"""Detects deployments that no node can host or that are removed, so that their requests fail at
once."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from runtime.errors import ModelUnavailableError
from serve_app.logs import get_logger
from serve_app.messages.listing import ListedModel

# Polling interval, and the longer one while every deployment has a replica.
POLL_S = 2.0
IDLE_POLL_S = 10.0

Resources = Mapping[str, float]

log = get_logger()


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """Resources of one replica of a deployment: each bundle on one node, `together` all on the same
    node, `apart` each on a different one.

    `what`: the name in messages, such as "model llama3.2:1b". `model`: the name of the model that
    the deployment serves, if it serves one.
    """

    what: str
    deployment: str
    bundles: tuple[Resources, ...]
    together: bool = False
    apart: bool = False
    model: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """State of the cluster: the resources of each node, the free resources of all nodes together,
    and by deployment of the application, once it is deployed, the running and starting replicas
    and Serve's status message."""

    nodes: Sequence[Resources] = ()
    free: Resources = field(default_factory=dict)
    running: Mapping[str, int] = field(default_factory=dict)
    starting: Mapping[str, int] = field(default_factory=dict)
    messages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """Facts from the time when the application was built: the need of each deployment by its name
    in `Schedulability`, the list entries of models whose files were present, and for each model
    with an encoder pool the name of its encoder deployment's need."""

    needs: Mapping[str, ReplicaResources] = field(default_factory=dict)
    known: Mapping[str, ListedModel] = field(default_factory=dict)
    encoders: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    async def view(self) -> ClusterView:
        """The current state. May raise any error while the cluster is not available."""


class Schedulability:
    """Polls the cluster for deployments that cannot be scheduled; `needs` by model name."""

    def __init__(self, needs: Mapping[str, ReplicaResources], cluster: Cluster) -> None:
        self._needs = needs
        self._cluster = cluster
        self._problems: dict[str, str] = {}
        self._waiting: dict[str, set[asyncio.Timeout]] = {name: set() for name in needs}

    def check(self, name: str) -> None:
        """Raises ModelUnavailableError if no replica can be started."""
        problem = self._problems.get(name)
        if problem is not None:
            raise ModelUnavailableError(problem)

    @asynccontextmanager
    async def wait_schedulable(self, name: str) -> AsyncIterator[None]:
        """Raises ModelUnavailableError in the body as soon as no node can host a replica."""
        self.check(name)
        timeout = asyncio.timeout(None)
        waiting = self._waiting.setdefault(name, set())
        waiting.add(timeout)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if timeout.expired():
                self.check(name)
            raise
        finally:
            waiting.discard(timeout)

    async def watch(self) -> None:
        """Polls until cancelled."""
        while True:
            try:
                view = await self._cluster.view()
                self.update(view)
                idle = all(view.running.get(n.deployment) for n in self._needs.values())
            except Exception as error:
                idle = False
                reason = f"{type(error).__name__}: {error}"[:300]
                log.info("cluster state unavailable", reason=reason)
            await asyncio.sleep(IDLE_POLL_S if idle else POLL_S)

    def update(self, view: ClusterView) -> None:
        for name, need in self._needs.items():
            problem = find_problem(need, view)
            before = self._problems.pop(name, None)
            if problem is None:
                if before is not None:
                    log.info("schedulable again", deployment=need.deployment)
                continue
            self._problems[name] = problem
            if problem != before:
                named = {} if need.model is None else {"model": need.model}
                log.error("not schedulable", deployment=need.deployment, reason=problem, **named)
            now = asyncio.get_running_loop().time()
            for timeout in self._waiting[name]:
                if not timeout.expired():  # it cannot be changed again while its body ends
                    timeout.reschedule(now)


def find_problem(need: ReplicaResources, view: ClusterView) -> str | None:
    """Why no replica can be started now; None if one runs or may still start.

    A deployment without starting replicas has no problem, because only a starting replica makes a
    cluster autoscaler add nodes; unless the application has been deployed again without it, while
    this process finishes its answers.
    """
    if view.running.get(need.deployment) or not view.nodes:
        return None
    if view.running and need.deployment not in view.running:
        return f"{need.what} is not part of the configuration any more"
    starting = view.starting.get(need.deployment)
    if starting and not _fits(need, view.nodes):
        return (
            f"{need.what} cannot be scheduled: a replica needs {_needed(need)}; of the cluster's "
            f"{len(view.nodes)} nodes the largest have {_largest(need, view.nodes)}. It starts as "
            "soon as a node has room, such as one that an autoscaler adds (its node types are not "
            "known here); or lower `num_gpus`, `num_cpus` or `parallel`."
        )
    message = view.messages.get(need.deployment, "")
    # Serve has the same message for a process that is slow to start, so resources must be short.
    lacking = any(not _holds(view.free, bundle) for bundle in need.bundles)
    if starting and "to be scheduled" in message and lacking:
        free = _format({name: view.free.get(name, 0.0) for name in _names(need)})
        return (
            f"{need.what} waits for resources: a replica needs {_needed(need)}; free in the whole "
            f"cluster are {free}. Stop another deployment, add a node, or lower `num_gpus`, "
            "`num_cpus` or `parallel`."
        )
    if "failed" in message.lower() and not starting:
        return f"{need.what} could not be started: {message.strip().splitlines()[-1][:500]}"
    return None


def _fits(need: ReplicaResources, nodes: Sequence[Resources]) -> bool:
    """True if the bundles fit on the nodes without other load, placed in descending order."""
    rooms = [dict(node) for node in nodes]
    bundles = [_sum(need.bundles)] if need.together else list(need.bundles)
    for bundle in sorted(bundles, key=_sizes, reverse=True):
        room = next((room for room in rooms if _holds(room, bundle)), None)
        if room is None:
            return False
        for name, count in bundle.items():
            room[name] = room.get(name, 0.0) - count
        if need.apart:
            room.clear()
    return True


def _sizes(bundle: Resources) -> list[float]:
    return sorted(bundle.values(), reverse=True)


def _holds(room: Resources, bundle: Resources) -> bool:
    return all(room.get(name, 0.0) >= count for name, count in bundle.items() if count)


def _sum(bundles: Sequence[Resources]) -> dict[str, float]:
    names = {name for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _names(need: ReplicaResources) -> list[str]:
    return sorted({name for bundle in need.bundles for name, count in bundle.items() if count})


def _needed(need: ReplicaResources) -> str:
    if len(need.bundles) == 1:
        return f"{_format(need.bundles[0])} on one node"
    where = "each on a node of its own" if need.apart else "each on one node"
    where = "on one node" if need.together else where
    return f"{len(need.bundles)} times {_format(need.bundles[0])}, {where}"


def _largest(need: ReplicaResources, nodes: Sequence[Resources]) -> str:
    return _format({name: max(node.get(name, 0.0) for node in nodes) for name in _names(need)})


def _format(resources: Resources) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in sorted(resources.items()))
