"""Who is killed, in which order and how: processes of this cluster alone."""

import os
import random
import signal
import time

from bench.chaos.cluster import NAME, Town, descendants
from bench.chaos.tally import Tally

# What the titles of their processes begin with.
TITLES = {
    "replica": f"ray::ServeReplica:{NAME}:demo",
    "encoder": f"ray::ServeReplica:{NAME}:VisionEncoder",
    "ingress": f"ray::ServeReplica:{NAME}:Ingress",
}
NODE, PROXY = "worker node", "proxy"
# Those that come again, as often as they are named.
AGAIN = ("replica", "replica", "replica", "encoder", "ingress")
PAUSE_S = (5.0, 9.0)
# For how long the death of one that holds clients' connections explains that these end.
CUTS_S = {"ingress": 5.0, NODE: 15.0, PROXY: 60.0}


class Killer:
    """Kills parts of the town with SIGKILL, at random, but some of each kind."""

    def __init__(self, town: Town, r: random.Random, tally: Tally) -> None:
        self._town = town
        self._r = r
        self._tally = tally

    def rampage(self, seconds: float) -> None:
        """So long, and until each kind has had its turn."""
        end = time.monotonic() + seconds
        present = [kind for kind in TITLES if self._processes(kind)]
        first = [*present, NODE, PROXY]
        self._r.shuffle(first)
        while first or time.monotonic() < end:
            time.sleep(self._r.uniform(*PAUSE_S))
            kind = first.pop() if first else self._r.choice([k for k in AGAIN if k in present])
            self._kill(kind)
        time.sleep(PAUSE_S[0])

    def _kill(self, kind: str) -> None:
        if kind in CUTS_S:
            self._tally.expect_cuts(CUTS_S[kind])
        if kind == NODE:
            self._town.lose_a_node(self._r)
        elif found := self._processes(kind):
            for pid in found if kind == PROXY else [self._r.choice(found)]:
                os.kill(pid, signal.SIGKILL)
        else:
            return  # they are starting
        self._tally.killed[kind] += 1
        print(f"killed: {kind}", flush=True)
        if kind == PROXY:
            self._town.await_answers()

    def _processes(self, kind: str) -> list[int]:
        if kind == PROXY:
            return descendants(os.getpid(), lambda title: title.split(" ")[0].endswith("haproxy"))
        return descendants(os.getpid(), lambda title: title.startswith(TITLES[kind]))
