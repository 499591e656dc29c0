"""`make chaos`: streams on a cluster of several nodes, of which parts are killed at random."""

import argparse
import random
import sys
from pathlib import Path

from bench.chaos.clients import Crowd
from bench.chaos.cluster import town
from bench.chaos.questions import questions, sees
from bench.chaos.tally import Tally
from bench.chaos.victims import Killer

MODEL = Path(__file__).parents[2] / "models" / "demo.gguf"


def main() -> None:
    arguments = _arguments()
    seeing = sees(arguments.model)
    r, tally = random.Random(arguments.seed), Tally()
    with town(arguments.model, seeing=seeing) as built:
        crowd = Crowd(built.url, questions(seeing=seeing), tally)
        killer = Killer(built, r, tally, crowd.all_heard_since)
        # Beside the main thread, in which alone Ray makes nodes.
        with crowd.streaming(arguments.streams, r):
            killer.rampage(arguments.seconds)
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
