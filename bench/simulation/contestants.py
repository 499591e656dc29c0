"""The policies that are compared: ours, and the usual policies of load balancers.

Ours has the information of an ingress: delayed reports and its own choices. The others have an
advantage: they know the current state of all replicas, whichever ingress receives a request, and
consistent hashing is given the conversation or document of each request.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

from bench.simulation.replica import Replica
from bench.simulation.traces import Request
from serve_app.messages.replica_load import PrefixHashes, ReplicaLoad
from serve_app.routing.policy import PolicyRules, RoutingPolicy

POINTS = 100  # points of each replica on the hash ring
BOUND = 1.25  # limit of a replica's load, as a multiple of the mean load


class Contestant(Protocol):
    """A policy. `finished`: a request ended on the replica, was lost with it, or was moved away.
    `moves`: the simulator calls `choose_earlier` for queued requests."""

    moves: bool

    def add(self, replica: str) -> None: ...

    def remove(self, replica: str) -> None: ...

    def report(self, replica: str, load: ReplicaLoad, now: float) -> None: ...

    def choose(self, request: Request, ingress: int, now: float) -> str: ...

    def choose_earlier(self, request: Request, ingress: int, now: float) -> str | None: ...

    def finished(self, replica: str) -> None: ...


Make = Callable[[Mapping[str, Replica]], Contestant]


class Ours:
    """The policy of serve_app, one instance per ingress.

    `share_prompts`: replicas report their recent prompts to all ingresses.
    """

    def __init__(
        self,
        ingresses: int = 1,
        *,
        rules: PolicyRules | None = None,
        share_prompts: bool = True,
        moves: bool = True,
    ) -> None:
        self.moves = moves
        self._policies = [
            RoutingPolicy(rules, random=Random(number)) for number in range(ingresses)
        ]
        self._unreported: dict[str, list[tuple[int, PrefixHashes]]] = defaultdict(list)
        self._share_prompts = share_prompts and ingresses > 1

    def add(self, replica: str) -> None:
        for policy in self._policies:
            policy.add(replica)

    def remove(self, replica: str) -> None:
        for policy in self._policies:
            policy.remove(replica)

    def report(self, replica: str, load: ReplicaLoad, now: float) -> None:
        prompts = self._unreported.pop(replica, ())
        for number, policy in enumerate(self._policies):
            for ingress, hashes in prompts:
                if ingress != number:
                    policy.record_prompt(replica, hashes)
            policy.report(replica, load, now=now)

    def choose(self, request: Request, ingress: int, now: float) -> str:
        chosen = self._policies[ingress].choose(request.hashes, now=now, request=request.id)
        assert chosen is not None
        self._note(chosen, ingress, request)
        return chosen

    def choose_earlier(self, request: Request, ingress: int, now: float) -> str | None:
        chosen = self._policies[ingress].choose_earlier(request.id, now=now)
        if chosen is not None:
            self._note(chosen, ingress, request)
        return chosen

    def _note(self, chosen: str, ingress: int, request: Request) -> None:
        if self._share_prompts:
            self._unreported[chosen].append((ingress, request.hashes))

    def finished(self, replica: str) -> None:
        pass


class _Omniscient:
    """Knows the current state of all replicas."""

    moves = False

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._names: list[str] = []
        self._random = Random(0)

    def add(self, replica: str) -> None:
        self._names.append(replica)

    def remove(self, replica: str) -> None:
        self._names.remove(replica)

    def report(self, replica: str, load: ReplicaLoad, now: float) -> None:
        pass

    def choose_earlier(self, request: Request, ingress: int, now: float) -> str | None:
        raise AssertionError("this policy does not move requests")

    def finished(self, replica: str) -> None:
        pass


class RoundRobin(_Omniscient):
    """Chooses the replicas in turn."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        super().__init__(replicas)
        self._turn = 0

    def choose(self, request: Request, ingress: int, now: float) -> str:
        self._turn += 1
        return self._names[self._turn % len(self._names)]


class PowerOfTwo(_Omniscient):
    """Chooses the less loaded of two random replicas, by requests or by queued tokens."""

    def __init__(self, replicas: Mapping[str, Replica], *, by_tokens: bool) -> None:
        super().__init__(replicas)
        self._by_tokens = by_tokens

    def choose(self, request: Request, ingress: int, now: float) -> str:
        pair = self._random.sample(self._names, min(2, len(self._names)))
        return min(pair, key=self._measure)

    def _measure(self, name: str) -> tuple[int, int]:
        replica = self._replicas[name]
        return replica.queued_tokens if self._by_tokens else 0, replica.outstanding


class LeastRequests(_Omniscient):
    """Chooses the replica with the fewest requests, from a heap whose outdated entries are
    skipped."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        super().__init__(replicas)
        self._heap: list[tuple[int, float, str]] = []
        self._members: set[str] = set()

    def add(self, replica: str) -> None:
        self._members.add(replica)
        self._push(replica, 0)

    def remove(self, replica: str) -> None:
        self._members.remove(replica)

    def finished(self, replica: str) -> None:
        if replica in self._members:
            self._push(replica, self._replicas[replica].outstanding)

    def choose(self, request: Request, ingress: int, now: float) -> str:
        while True:
            count, _, name = heapq.heappop(self._heap)
            if name in self._members and self._replicas[name].outstanding == count:
                self._push(name, count + 1)
                return name

    def _push(self, name: str, count: int) -> None:
        heapq.heappush(self._heap, (count, self._random.random(), name))


class ConsistentHashing(_Omniscient):
    """Chooses the replica of the conversation or document on the hash ring, or the next replica on
    the ring whose load is below the bound."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        super().__init__(replicas)
        self._ring: list[tuple[int, str]] = []
        self._outstanding = 0

    def add(self, replica: str) -> None:
        super().add(replica)
        for point in range(POINTS):
            insort(self._ring, (Random(f"{replica}/{point}").getrandbits(60), replica))

    def remove(self, replica: str) -> None:
        super().remove(replica)
        self._ring = [entry for entry in self._ring if entry[1] != replica]

    def finished(self, replica: str) -> None:
        self._outstanding -= 1

    def choose(self, request: Request, ingress: int, now: float) -> str:
        self._outstanding += 1
        most = BOUND * self._outstanding / len(self._names)
        place = bisect_left(self._ring, (Random(request.affinity).getrandbits(60), ""))
        for step in range(len(self._ring)):
            name = self._ring[(place + step) % len(self._ring)][1]
            if self._replicas[name].outstanding < most:
                return name
        raise AssertionError("all replicas are above the bound")


OTHERS: dict[str, Make] = {
    "round robin": RoundRobin,
    "power of two, by requests": lambda replicas: PowerOfTwo(replicas, by_tokens=False),
    "power of two, by tokens": lambda replicas: PowerOfTwo(replicas, by_tokens=True),
    "least requests": LeastRequests,
    "consistent hashing, bounded": ConsistentHashing,
}
