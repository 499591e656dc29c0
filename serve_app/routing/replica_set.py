"""The replicas of one deployment: Serve lists them, they report their load, the policy chooses."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.gateway.model_card import ModelCard
from serve_app.gateway.replica_calls import Replicas, outside_request
from serve_app.gateway.tasks import Task
from serve_app.routing.policy import RoutingPolicy
from serve_app.routing.prefix_hashes import prefix_hashes_of
from serve_app.transport.watch import Watcher
from serve_app.transport.wire import Address, LoadReport

CARD_LIFE_S = 10.0
RETRY_S = 0.05
REPORT_EVERY_S = 0.1
# Reports per second that an ingress requests from all replicas of a model together, up to twice as
# many while replicas are added; with more replicas, each reports less often.
REPORTS_PER_S = 2000

# The routers by application and deployment. Serve constructs them, so a replica set finds the one
# of its deployment here.
routers: WeakValueDictionary[tuple[str, str], "ListingRouter"] = WeakValueDictionary()


class ListingRouter(RequestRouter):
    """Serve's request router of deployments whose replicas are called one by one. It routes control
    calls only, and its list of running replicas is what `ReplicaSet` chooses from."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with the `request_router_kwargs` of the deployment."""
        # Serve pickles this class by value, with copies of the globals that it refers to, so the
        # registry is imported here.
        from serve_app.routing.replica_set import routers

        routers[self.app_name, kwargs["deployment"]] = self

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that the call names as its session; for other calls first two random
        replicas, then all replicas if those two are full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            if name := pending_request.metadata.session_id:
                return [[each for each in candidate_replicas if each.replica_id.unique_id == name]]
        first = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        return [first, candidate_replicas]


def router_config(deployment: str) -> dict[str, Any]:
    """The `request_router_config` of a deployment of this name."""
    return {
        "request_router_class": f"{__name__}.{ListingRouter.__name__}",
        "request_router_kwargs": {"deployment": deployment},
    }


class ReplicaSet(Replicas):
    """The known replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._describing = handle.options(method_name="describe")
        super().__init__(self._describing)
        self._name = handle.app_name, handle.deployment_name
        self._policy = RoutingPolicy()
        self._listed: Mapping[ReplicaID, RunningReplica] = {}
        self._addresses: dict[str, Address] = {}
        self._unserved: frozenset[str] = frozenset()  # they report an idle engine
        self._watchers: dict[str, Watcher] = {}
        self._card: tuple[float, ModelCard] | None = None  # with the time of the call

    async def choose(self, task: Task, *, avoid: frozenset[str] = frozenset()) -> Address:
        """The replica for a task; waits until there is one. Replicas in `avoid`, and those that
        could not load the model, are chosen only if there is no other."""
        while not self._refresh():
            await self.await_one()
        chosen = self._policy.choose(
            prefix_hashes_of(task), now=_now(), avoid=avoid | self._unserved, request=task.id
        )
        assert chosen is not None
        return self._addresses[chosen]

    async def choose_earlier(
        self, task: Task, *, avoid: frozenset[str] = frozenset()
    ) -> Address | None:
        """A replica that would start a queued task far earlier; None if it should stay."""
        self._refresh()
        avoid |= self._unserved
        chosen = self._policy.choose_earlier(task.id, now=_now(), avoid=avoid)
        return None if chosen is None else self._addresses[chosen]

    async def describe(self, *, verbose: bool) -> ModelCard:
        """The card of any replica, at most `CARD_LIFE_S` old unless `verbose`. If a replica is
        lost, another one or the next that starts is called."""
        if self._card is not None and not verbose and _now() - self._card[0] <= CARD_LIFE_S:
            return self._card[1]
        while True:
            try:
                card: ModelCard = await outside_request(self._describing.remote, verbose=verbose)
                break
            except RayActorError:
                await asyncio.sleep(RETRY_S)
        if not verbose:
            self._card = _now(), card
        return card

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.close()

    def _refresh(self) -> bool:
        """Follows Serve's list of running replicas. False if there are none."""
        router = routers.get(self._name)
        listed = {} if router is None else router.curr_replicas
        # Serve replaces the mapping when replicas are added and removes lost ones from it.
        if listed is not self._listed or len(listed) != len(self._addresses):
            self._listed = listed
            self._update({each.replica_id.unique_id: each for each in list(listed.values())})
        return bool(self._addresses)

    def _update(self, running: Mapping[str, RunningReplica]) -> None:
        for name in self._policy.replicas - running.keys():
            self._policy.remove(name)
            self._watchers.pop(name).close()
            del self._addresses[name]
        every_s = max(REPORT_EVERY_S, len(running) / REPORTS_PER_S)
        for name, watcher in list(self._watchers.items()):
            if every_s > 2 * watcher.every_s:  # subscribed when there were far fewer replicas
                watcher.close()
                self._watch(name, every_s)
        for name in running.keys() - self._policy.replicas:
            address = replace(Address(**running[name].replica_metadata), replica=name)
            self._addresses[name] = address
            self._policy.add(name)
            self._watch(name, every_s)
        unserved = (name for name, address in self._addresses.items() if not address.model)
        self._unserved = frozenset(unserved)

    def _watch(self, name: str, every_s: float) -> None:
        report, lost = partial(self._record, name), partial(self._doubt, name)
        self._watchers[name] = Watcher(self._addresses[name], report, lost, every_s=every_s)

    def _record(self, name: str, report: LoadReport) -> None:
        self._policy.report(name, report.load, now=_now())
        for hashes in report.hashes:
            self._policy.record_prompt(name, hashes)

    def _doubt(self, name: str) -> None:
        self._policy.doubt(name, now=_now())


def _now() -> float:
    """Seconds on the clock of the event loop, which timeouts use too."""
    return asyncio.get_running_loop().time()
