"""`make chaos`: kills parts of a cluster of several nodes at random, under load."""

import argparse
import random
import sys
from pathlib import Path

from bench.chaos.clients import Clients
from bench.chaos.cluster import running_cluster
from bench.chaos.questions import has_vision, questions
from bench.chaos.tally import Tally
from bench.chaos.victims import Killer

MODEL = Path(__file__).parents[2] / "models" / "demo.gguf"


def main() -> None:
    arguments = _arguments()
    vision = has_vision(arguments.model)
    r, tally = random.Random(arguments.seed), Tally()
    with running_cluster(arguments.model, vision=vision) as built:
        clients = Clients(built.url, questions(vision=vision), tally)
        killer = Killer(built, r, tally, clients.all_received_since)
        # In another thread: Ray creates nodes in the main thread only.
        with clients.streaming(arguments.streams, r):
            killer.run(arguments.seconds)
    print(tally.page())
    sys.exit(tally.broken > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a GGUF file")
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--seconds", type=float, default=75.0, help="of killing")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    return arguments


main()
