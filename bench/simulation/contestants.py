"""Policies that are compared: ours, and those that balancers usually have.

Ours sees what an ingress sees: late reports, and its own choices. The others are better off: they
see all replicas as they are at every moment, whichever ingress a request comes through, and where
they keep conversations together they are told which is which.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

from bench.simulation.replica import Replica
from bench.simulation.traces import Request
from serve_app.routing.policy import Load, RoutingPolicy, Rules
from serve_app.routing.prefixes import PrefixHashes

POINTS = 100  # of each replica on the ring
BOUND = 1.25  # times the mean load, at most


class Contestant(Protocol):
    """`finished`: a request has ended on a replica, or ended with it, or left it. `moves`: whether
    `better` is asked, now and then, where else requests should go that wait."""

    moves: bool

    def admit(self, replica: str) -> None: ...

    def forget(self, replica: str) -> None: ...

    def report(self, replica: str, load: Load, now: float) -> None: ...

    def choose(self, request: Request, ingress: int, now: float) -> str: ...

    def better(self, request: Request, ingress: int, now: float) -> str | None: ...

    def finished(self, replica: str) -> None: ...


Make = Callable[[Mapping[str, Replica]], Contestant]


class Ours:
    """The policy of serve_app, once for each ingress.

    `telling`: with its reports a replica tells all of them what it was asked since the last one.
    """

    def __init__(
        self,
        ingresses: int = 1,
        *,
        rules: Rules | None = None,
        telling: bool = True,
        moves: bool = True,
    ) -> None:
        self.moves = moves
        self._policies = [
            RoutingPolicy(rules, random=Random(number)) for number in range(ingresses)
        ]
        self._untold: dict[str, list[tuple[int, PrefixHashes]]] = defaultdict(list)
        self._telling = telling and ingresses > 1

    def admit(self, replica: str) -> None:
        for policy in self._policies:
            policy.admit(replica)

    def forget(self, replica: str) -> None:
        for policy in self._policies:
            policy.forget(replica)

    def report(self, replica: str, load: Load, now: float) -> None:
        told = self._untold.pop(replica, ())
        for number, policy in enumerate(self._policies):
            for ingress, chain in told:
                if ingress != number:
                    policy.learn(replica, chain)
            policy.report(replica, load, now=now)

    def choose(self, request: Request, ingress: int, now: float) -> str:
        task = f"{id(request)}"  # which lives as long as it is known
        chosen = self._policies[ingress].choose(request.chain, now=now, task=task)
        assert chosen is not None
        self._note(chosen, ingress, request)
        return chosen

    def better(self, request: Request, ingress: int, now: float) -> str | None:
        chosen = self._policies[ingress].better(f"{id(request)}", now=now)
        if chosen is not None:
            self._note(chosen, ingress, request)
        return chosen

    def _note(self, chosen: str, ingress: int, request: Request) -> None:
        if self._telling:
            self._untold[chosen].append((ingress, request.chain))

    def finished(self, replica: str) -> None:
        pass


class _Seeing:
    """Knows all replicas as they are."""

    moves = False

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._names: list[str] = []
        self._random = Random(0)

    def admit(self, replica: str) -> None:
        self._names.append(replica)

    def forget(self, replica: str) -> None:
        self._names.remove(replica)

    def report(self, replica: str, load: Load, now: float) -> None:
        pass

    def better(self, request: Request, ingress: int, now: float) -> str | None:
        raise AssertionError("requests stay where they are")

    def finished(self, replica: str) -> None:
        pass


class RoundRobin(_Seeing):
    """One after the other."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        super().__init__(replicas)
        self._turn = 0

    def choose(self, request: Request, ingress: int, now: float) -> str:
        self._turn += 1
        return self._names[self._turn % len(self._names)]


class PowerOfTwo(_Seeing):
    """The better of two drawn at random, by requests or by queued tokens."""

    def __init__(self, replicas: Mapping[str, Replica], *, by_tokens: bool) -> None:
        super().__init__(replicas)
        self._by_tokens = by_tokens

    def choose(self, request: Request, ingress: int, now: float) -> str:
        pair = self._random.sample(self._names, min(2, len(self._names)))
        return min(pair, key=self._measure)

    def _measure(self, name: str) -> tuple[int, int]:
        replica = self._replicas[name]
        return replica.queued_tokens if self._by_tokens else 0, replica.outstanding


class LeastRequests(_Seeing):
    """The fewest requests of all replicas, by a heap whose entries are checked when they lead."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        super().__init__(replicas)
        self._heap: list[tuple[int, float, str]] = []
        self._members: set[str] = set()

    def admit(self, replica: str) -> None:
        self._members.add(replica)
        self._push(replica, 0)

    def forget(self, replica: str) -> None:
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


class ConsistentHashing(_Seeing):
    """A conversation's or document's own replica, or the next on the ring that is not too full."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        super().__init__(replicas)
        self._ring: list[tuple[int, str]] = []
        self._outstanding = 0

    def admit(self, replica: str) -> None:
        super().admit(replica)
        for point in range(POINTS):
            insort(self._ring, (Random(f"{replica}/{point}").getrandbits(60), replica))

    def forget(self, replica: str) -> None:
        super().forget(replica)
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
        raise AssertionError("all replicas have more than the mean")


OTHERS: dict[str, Make] = {
    "round robin": RoundRobin,
    "power of two, by requests": lambda replicas: PowerOfTwo(replicas, by_tokens=False),
    "power of two, by tokens": lambda replicas: PowerOfTwo(replicas, by_tokens=True),
    "least requests": LeastRequests,
    "consistent hashing, bounded": ConsistentHashing,
}
