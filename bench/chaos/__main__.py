"""`make chaos`: kills parts of a cluster of several nodes at random, under load."""

import argparse
import os
import random
import sys
from pathlib import Path

from bench.chaos.clients import Clients
from bench.chaos.cluster import FIRST_WAITING, ChaosCluster, Size, deploy, running_cluster
from bench.chaos.questions import has_vision, questions
from bench.chaos.tally import Tally
from bench.chaos.victims import Killer
from tests.checkout import DEMO_MODEL


def main() -> None:
    arguments = _arguments()
    vision = has_vision(arguments.model) and not arguments.rollovers
    r, tally = random.Random(arguments.seed), Tally()
    with running_cluster(arguments.model, _size(arguments, vision=vision)) as built:
        clients = Clients(built.url, questions(vision=vision), tally)
        # The clients run in another thread, because Ray creates nodes in the main thread only.
        with clients.streaming(arguments.streams, r):
            if arguments.rollovers:
                roll_over(built, arguments.model, arguments.rollovers, tally)
            else:
                Killer(built, r, tally, clients.all_received_since).run(arguments.seconds)
    print(tally.page())
    load_average = os.getloadavg()[2]  # of 15 minutes
    print(f"load average     {load_average:.1f} (15 minutes) on {os.cpu_count()} processors")
    sys.exit(not tally.passed)


def roll_over(built: ChaosCluster, model: Path, times: int, tally: Tally) -> None:
    for number in range(times):
        tally.note_fault("rollover")
        deploy(model, built.size, max_waiting=FIRST_WAITING + 1 + number)


def _size(arguments: argparse.Namespace, *, vision: bool) -> Size:
    if arguments.rollovers:
        return Size(nodes=1, replicas=2, ingresses=1)
    return Size(nodes=3, replicas=3, ingresses=2, encoders=2 * vision)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="a GGUF file")
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--seconds", type=float, default=75.0, help="of killing")
    parser.add_argument("--hours", type=float, help="instead of seconds")
    parser.add_argument("--rollovers", type=int, help="of a changed configuration; kills nothing")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    if arguments.hours:
        arguments.seconds = 3600 * arguments.hours
    print(f"seed {arguments.seed}", flush=True)
    return arguments


main()
