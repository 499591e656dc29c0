"""The replicas of one deployment: Serve lists them, they report their load, the policy chooses."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import ReplicaID, RunningReplica

from runtime.errors import ReplicaLostError
from serve_app.messages.model_card import ModelCard
from serve_app.messages.tasks import Task
from serve_app.routing.listing_router import routers
from serve_app.routing.named_replicas import NamedReplicas
from serve_app.routing.policy import RoutingPolicy
from serve_app.routing.prefix_hashes import prefix_hashes_of
from serve_app.routing.prefix_memory import PrefixMemory
from serve_app.routing.replica_calls import Replicas
from serve_app.transport.load_watcher import LoadWatcher
from serve_app.transport.wire import Address, LoadReport

CARD_LIFE_S = 10.0
# How long Serve may list replicas that do not run any more, or that cannot answer.
LOST_S = 30.0
RETRY_S = 0.05
# How long one replica is waited for before another one is called as well.
PATIENCE_S = 1.0
REPORT_EVERY_S = 0.1
# Reports per second that an ingress requests from all replicas of a model together, up to twice as
# many while replicas are added; with more replicas, each reports less often.
REPORTS_PER_S = 2000


class ReplicaSet(Replicas):
    """The known replicas of one deployment. `memory`: which replica holds which prefix, which the
    sets of an ingress share; by default one of its own."""

    def __init__(self, handle: DeploymentHandle, memory: PrefixMemory | None = None) -> None:
        super().__init__(NamedReplicas(handle))
        self._name = handle.app_name, handle.deployment_name
        self._policy = RoutingPolicy(memory=memory)
        self._listed: Mapping[ReplicaID, RunningReplica] = {}
        self._addresses: dict[str, Address] = {}
        self._unserved: frozenset[str] = frozenset()  # they report an idle engine
        self._watchers: dict[str, LoadWatcher] = {}
        self._card: tuple[float, ModelCard] | None = None  # with the time of the call

    @property
    def serving(self) -> bool:
        """Whether a replica runs that has loaded the model."""
        router = routers.get(self._name)
        listed = () if router is None else list(router.curr_replicas.values())
        return any(Address(**each.replica_metadata).model for each in listed)

    async def choose(
        self, task: Task, *, avoid: frozenset[str] = frozenset(), identity: str | None = None
    ) -> Address:
        """The replica for a task; waits until there is one. Replicas in `avoid` are chosen only if
        there is no other, and after them those that could not load the model or have another
        `identity`, if one is stated."""
        while not self._refresh():
            await self.await_one()
        unable = self._unserved if identity is None else self._others_than(identity)
        chosen = self._policy.choose(
            prefix_hashes_of(task), now=_now(), avoid=avoid, unable=unable, request=task.id
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
        """The card of any replica that has loaded the model, at most `CARD_LIFE_S` old unless
        `verbose`; waits until there is one. Raises the error of a replica if no other has a card,
        ReplicaLostError if those that Serve lists have been lost for `LOST_S`.
        """
        if self._card is not None and not verbose and _now() - self._card[0] <= CARD_LIFE_S:
            return self._card[1]
        lost_since: float | None = None
        while True:
            try:
                card: ModelCard = await self.ask_any("describe", verbose, patience_s=PATIENCE_S)
                break
            except ReplicaLostError:
                await self.await_one()
                lost_since = _now() if lost_since is None else lost_since
                if _now() - lost_since > LOST_S:
                    raise
                await asyncio.sleep(RETRY_S)
        if not verbose:
            self._card = _now(), card
        return card

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.close()

    def _others_than(self, identity: str) -> frozenset[str]:
        addresses = self._addresses.items()
        return frozenset(name for name, address in addresses if address.model != identity)

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
        self._watchers[name] = LoadWatcher(self._addresses[name], report, lost, every_s=every_s)

    def _record(self, name: str, report: LoadReport) -> None:
        self._policy.report(name, report.load, now=_now())
        for hashes in report.hashes:
            self._policy.record_prompt(name, hashes)

    def _doubt(self, name: str) -> None:
        self._policy.doubt(name, now=_now())


def _now() -> float:
    """Seconds on the clock of the event loop, which timeouts use too."""
    return asyncio.get_running_loop().time()
