"""Tables → the section of bench/RESULTS.md."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from bench.machine import describe_processor
from bench.sections import ROUTING
from bench.simulation.measure import Row, Table

METHOD = """\
Written by `python -m bench.simulate`. Nothing here was served: replicas, requests and time are
simulated, the code that chooses is `serve_app/routing/policy.py` as the ingress runs it. A
replica is a step of continuous batching after the other: rows that decode first, then chunks of
prompts in the order of their arrival, up to the step's tokens; a cache of prefixes that forgets
the longest unused first; what its costs are, and from where, is in
`bench/simulation/scenarios.py` (the CPU's are measured with this engine, the accelerator's
calculated from a data sheet).
Conversations have
system messages of Zipf's popularity, some turns, growing histories and pauses; the next turn comes
after the answer to the last. Documents are asked about again and again, by Zipf too. Policies
choose for the same trace. Ours moves requests that wait, three times at most, as the ingress does.

Ours sees what an ingress sees: reports every 0.1 s (1 s with 2,048 replicas), and what it has
chosen itself; ingresses take requests at random. **The others have it better**: they see each
replica as it is at every moment, from all ingresses at once, and consistent hashing (bound 1.25) is
told which requests are of one conversation or document.

Times are to the first token, from the arrival, those of requests that lost their replica included.
"saved": tokens of prompts that caches gave. "in time": tokens of answers, each second, whose first
token came within 10 s on CPUs, 0.5 s on accelerators. "busy": of the time, on the mean and on the
busiest replica; what begins within the time counts whole, also many steps that only decode, so it
may pass 100%. "decision": CPU time of choosing, of this code on this machine. One trace and one
seed each: differences of a few percent mean nothing."""
VARIANTS = """\
Ours, through 8 ingresses, with other numbers or without a part. The defaults of `Rules` are:
`samples` 4, `holders` 4, `patience_s` 0.1, `loyalty` 3, `running_tokens` 32, `settle_s` 0.1.

Moving who waits (the last rows of each table) serves those who came first before those who came
after help had arrived: the longest waits are halved, and fewer answers begin at once."""


def routing_page(tables: Sequence[Table], tried: Sequence[Table], wall_s: float) -> str:
    requests = sum(len(table.rows) * table.requests for table in (*tables, *tried))
    sections = [
        ROUTING,
        METHOD,
        f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"
        f"- {describe_processor()}\n"
        f"- load average when it ended: {os.getloadavg()[0]:.1f} (0 is an idle machine)\n"
        f"- Python {platform.python_version()}\n"
        f"- {requests:,} requests in all, simulated in {wall_s / 60:.0f} minutes",
        *(f"## {table.scenario.name}\n\n{_table(table)}" for table in tables),
    ]
    if tried:
        sections += ["## What the numbers and the parts are worth", VARIANTS]
        sections += [f"{table.scenario.name}:\n\n{_table(table)}" for table in tried]
    return "\n\n".join(sections) + "\n"


def _table(table: Table) -> str:
    scenario = table.scenario
    measured = f"{scenario.warm_s:.0f} to {scenario.seconds:.0f}"
    lines = [
        f"{table.requests:,} requests for each policy, measured from second {measured}.",
        "",
        "| policy | first token p50, ms | p95 | p99 | between tokens, ms | saved "
        "| in time, tokens/s | busy, mean / most | decision, µs |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *map(_line, table.rows)])


def _line(row: Row) -> str:
    first = " | ".join(f"{1000 * each:,.0f}" for each in row.first_s)
    return (
        f"| {row.policy} | {first} | {1000 * row.between_s:.1f} | {row.saved:.1%} "
        f"| {row.in_time_tokens_per_s:,.0f} | {row.busy:.0%} / {row.busiest:.0%} "
        f"| {1e6 * row.decision_s:.0f} |"
    )
