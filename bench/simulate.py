"""`python -m bench.simulate`: compares routing policies over simulated replicas.

The simulator is in `bench/simulation`; our policy is the code that the ingress runs.
"""

import argparse
import time
from dataclasses import replace

from bench.machine import describe_machine
from bench.sections import ROUTING, publish
from bench.simulation.measure import OURS, Table, compared, measured, over_traces
from bench.simulation.page import routing_page
from bench.simulation.scenarios import Scenario, scenarios
from bench.simulation.variants import STAYING, moving_and_staying, variants

QUICK = 0.1


def main() -> None:
    arguments = _arguments()
    machine, begin = describe_machine(packages=()), time.monotonic()
    chosen = [_shortened(each) if arguments.quick else each for each in scenarios()]
    tables = [compared(scenario) for scenario in chosen if arguments.only in scenario.name]
    tried: list[Table] = []
    moving = None
    if not arguments.only:
        tried = [
            measured(_shortened(scenario) if arguments.quick else scenario, contestants)
            for scenario, contestants in variants()
        ]
        late, makes = moving_and_staying()
        late = _shortened(late) if arguments.quick else late
        moving = over_traces(late, makes[OURS]), over_traces(late, makes[STAYING])
    page = routing_page(tables, tried, moving, machine, time.monotonic() - begin)
    publish(ROUTING, page, write=not (arguments.quick or arguments.only))


def _shortened(scenario: Scenario) -> Scenario:
    return replace(scenario, seconds=QUICK * scenario.seconds, warm_s=QUICK * scenario.warm_s)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    parser.add_argument("--only", default="", help="run only scenarios whose name contains this")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="simulate a tenth of the time, and write nothing",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
