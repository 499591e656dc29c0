"""Kills processes of the cluster in random order."""

import os
import random
import signal
import time
from collections.abc import Callable

from bench.chaos.cluster import NAME, ChaosCluster, descendants
from bench.chaos.tally import Tally

DEPLOYMENTS = {"replica": "demo", "encoder": "VisionEncoder:demo", "ingress": "Ingress"}
# The beginnings of the processes' titles, by kind.
TITLES = {kind: f"ray::ServeReplica:{NAME}:{name}" for kind, name in DEPLOYMENTS.items()}
NODE, PROXY = "worker node", "proxy"
# How often each kind is killed, relative to the others.
WEIGHTS = {"replica": 12, "encoder": 4, "ingress": 4, PROXY: 1, NODE: 1}
PAUSE_S = (1.0, 3.0)
LONGEST_PAUSE_S = 60.0
# The longest extra time to wait for kinds that have not been killed yet.
PATIENCE_S = 120.0
# Lost connections count as the effect of a fault for this long after a process that held
# connections of clients was killed.
CUTS_S = {"ingress": 5.0, NODE: 15.0, PROXY: 5.0}


class Killer:
    """Kills parts of the cluster with SIGKILL: at random, but some of each kind.

    `recovered(since)`: whether all streams have had output since a time. A request that loses too
    many replicas in a row fails, so the next process is killed only after the streams have
    recovered.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        r: random.Random,
        tally: Tally,
        recovered: Callable[[float], bool],
    ) -> None:
        self._cluster = cluster
        self._r = r
        self._tally = tally
        self._recovered = recovered
        self._present = [kind for kind in TITLES if self._processes(kind)]

    def run(self, seconds: float) -> None:
        """Runs for `seconds`, and until each kind has been killed."""
        end = time.monotonic() + seconds
        first = [*self._present, NODE, PROXY]
        kinds, weights = list(first), [WEIGHTS[kind] for kind in first]
        self._r.shuffle(first)
        while time.monotonic() < (end + PATIENCE_S if first else end):
            self._pause()
            kind = first.pop() if first else self._r.choices(kinds, weights)[0]
            if not self._kill(kind) and kind not in self._tally.kinds:
                first.insert(0, kind)  # its turn comes again
        self._pause()
        self._tally.spared += first

    def _pause(self) -> None:
        started = time.monotonic()
        time.sleep(self._r.uniform(*PAUSE_S))
        while not self._recovered(started) and time.monotonic() < started + LONGEST_PAUSE_S:
            time.sleep(0.1)

    def _kill(self, kind: str) -> bool:
        """Kills a process of this kind; returns False without killing while too many are being
        replaced, since losing the only one would not test failover."""
        there = [] if kind == NODE else self._processes(kind)
        if not (self._cluster.is_whole() if kind == NODE else self._spare(kind, there)):
            return False
        if kind in CUTS_S:
            self._tally.expect_cuts(CUTS_S[kind])
        self._tally.note_fault(kind)
        if kind == NODE:
            self._cluster.lose_a_node(self._r)
        for pid in there if kind == PROXY else there[:1]:
            os.kill(pid, signal.SIGKILL)
        if kind == PROXY:
            self._cluster.await_answers()
        return True

    def _spare(self, kind: str, there: list[int]) -> bool:
        if kind == PROXY:
            return bool(there)
        return len(there) > 1 and self._cluster.running(DEPLOYMENTS[kind]) > 1

    def _processes(self, kind: str) -> list[int]:
        """Their process ids, in random order."""
        if kind == PROXY:
            found = descendants(os.getpid(), lambda title: title.split(" ")[0].endswith("haproxy"))
        else:
            found = descendants(os.getpid(), lambda title: title.startswith(TITLES[kind]))
        self._r.shuffle(found)
        return found
