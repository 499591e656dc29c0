"""Which replica answers: Serve knows who is there, they tell their loads, a policy chooses."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.tasks import Task
from serve_app.routing.policy import RoutingPolicy
from serve_app.routing.prefix_hashes import prefix_hashes_of
from serve_app.transport.watch import Listener, Watcher
from serve_app.transport.wire import Address, Report

CARD_LIFE_S = 10.0
# Without a replica for so long, a request is shown to Serve as one that waits.
KNOCK_S = 0.05
REPORT_EVERY_S = 0.1
# So often, for all tasks that wait together, it is looked who has come.
LOOK_S = 0.5
# So many replicas are heard of so often; were there more, an ingress would do little but listen.
REPORTS_PER_S = 2000

ROUTER = {"request_router_class": f"{__name__}.ListingRouter"}

Census = list[list[RunningReplica]]


class ListingRouter(FIFOMixin, RequestRouter):
    """Serve's router of model replicas. Who brings a `census` gets all of them in it."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Calls for control go anywhere; where that is full, to the others."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            census = pending_request.kwargs.get("census")
            if census is not None:
                census.append(candidate_replicas)
                return [candidate_replicas]
        first = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        return [first, candidate_replicas]


class HandleDirectory:
    """The replicas behind one deployment handle per model."""

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._choosers = {
            name: handle.options(method_name="describe") for name, handle in handles.items()
        }
        self._replica_sets = {name: ReplicaSet(handle) for name, handle in self._choosers.items()}
        self._cards: dict[str, tuple[float, ModelCard]] = {}  # with the time it was asked for

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address:
        return await self._replica_sets[task.model].choose(task, avoid)

    async def better(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address | None:
        return await self._replica_sets[task.model].better(task, avoid)

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        """A card changes only when a replica is started anew, so a recent one will do."""
        if verbose:
            return await self._described(model, verbose=True)
        asked_at, card = self._cards.get(model, (0.0, None))
        if card is None or _now() - asked_at > CARD_LIFE_S:
            card = await self._described(model, verbose=False)
            self._cards[model] = (_now(), card)
        return card

    async def _described(self, model: str, *, verbose: bool) -> ModelCard:
        """By any replica; where one dies while it is asked, by another, or the next that comes."""
        while True:
            try:
                return await self._choosers[model].remote(verbose=verbose)
            except RayActorError:
                await asyncio.sleep(KNOCK_S)


class ReplicaSet:
    """The replicas of one deployment, as this process knows them."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._policy = RoutingPolicy()
        self._seen: list[RunningReplica] | None = None  # which the rest here is of
        self._met_at = float("-inf")
        self._addresses: dict[str, Address] = {}
        self._watchers: dict[str, Watcher] = {}

    async def choose(self, task: Task, avoid: frozenset[str]) -> Address:
        """Waits until there is a replica."""
        chain = prefix_hashes_of(task)
        while True:
            self._meet(await self._census())
            now = _now()
            chosen = self._policy.choose(chain, now=now, avoid=avoid, task=task.id)
            if chosen is not None:
                return self._addresses[chosen]

    async def better(self, task: Task, avoid: frozenset[str]) -> Address | None:
        """Where a task that waits begins far earlier than where it is."""
        if _now() - self._met_at > LOOK_S:
            self._meet(await self._census())
        chosen = self._policy.better(task.id, now=_now(), avoid=avoid)
        return None if chosen is None else self._addresses[chosen]

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.close()

    async def _census(self) -> list[RunningReplica]:
        """Who is there. While nobody is, a call waits too: such calls make Serve start one."""
        asking = asyncio.create_task(self._asked())
        try:
            found, _ = await asyncio.wait({asking}, timeout=KNOCK_S)
            if found:
                return asking.result()
            knock = self._handle.remote()
            try:
                return await asking
            finally:
                knock.cancel()
        finally:
            asking.cancel()

    async def _asked(self) -> list[RunningReplica]:
        census: Census = []
        # Without a reservation: the task does not travel through the handle.
        async with self._handle.choose_replica(census=census, _reserve=False):
            return census[-1]

    def _meet(self, replicas: list[RunningReplica]) -> None:
        """Serve makes a new list whenever something changes."""
        self._met_at = _now()
        if replicas is self._seen:
            return
        self._seen = replicas
        present = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._policy.replicas - present.keys():
            self._policy.forget(name)
            self._watchers.pop(name).close()
            del self._addresses[name]
        every_s = max(REPORT_EVERY_S, len(present) / REPORTS_PER_S)
        for name in present.keys() - self._policy.replicas:
            address = replace(Address(**present[name].replica_metadata), replica=name)
            self._addresses[name] = address
            self._policy.admit(name)
            listener = Listener(partial(self._note, name), partial(self._lose, name))
            self._watchers[name] = Watcher(address, listener, every_s=every_s)

    def _note(self, name: str, report: Report) -> None:
        self._policy.report(name, report.load, now=_now())
        for chain in report.chains:
            self._policy.learn(name, chain)

    def _lose(self, name: str) -> None:
        self._policy.doubt(name, now=_now())


def _now() -> float:
    """On the clock of the event loop, by which timeouts go too."""
    return asyncio.get_running_loop().time()
