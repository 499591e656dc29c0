"""Formats the tables as a section of bench/RESULTS.md."""

from collections.abc import Sequence
from textwrap import fill

from bench.sections import ROUTING
from bench.simulation.measure import TRACES, Row, Table, TraceMeans

METHOD = """\
Written by `python -m bench.simulate`. Replicas, requests and time are simulated; the policy is
`serve_app/routing/policy.py`, the code that the ingress runs. A replica is a sequence of steps of
continuous batching: decoding rows first, then chunks of prompts in the order of arrival, up to the
step's tokens; its prefix cache evicts the least recently used entries. The costs and their sources
are in `bench/simulation/scenarios.py` (CPU: measured with this engine; accelerator: calculated from
a data sheet). Conversations have system messages with Zipf popularity, several turns, growing
histories and pauses; the next turn follows the answer to the last. Documents have repeated
questions, with Zipf popularity too. All policies get the same trace. Ours moves queued requests, at
most three times each, as the ingress does.

Ours has the information of an ingress: reports every 0.1 s (1 s with 2,048 replicas) and its own
choices; ingresses get requests at random. **The others have an advantage**: they know the current
state of each replica, from all ingresses at once, and consistent hashing (bound 1.25) is given the
conversation or document of each request.

Times are to the first token from the arrival, including requests that lost their replica. "saved":
share of prompt tokens that came from caches. "in time": answer tokens per second of answers whose
first token came within 10 s on CPUs, 0.5 s on accelerators. "busy": share of the time in which a
replica was there, mean and busiest replica; steps that begin within the period count whole, so it
may pass 100%. "decision": CPU time of choosing, of this code on this machine. One trace and one
seed each: differences of a few percent mean nothing."""
VARIANTS = """\
Ours, with 8 ingresses and other parameters or without a part. The defaults of `PolicyRules` are:
`samples` 4, `holders` 4, `patience_s` 0.1, `recompute_weight` 3, `running_tokens` 32,
`report_lag_s` 0.1."""
MOVING = """\
Moving queued requests (the last rows of each table) matters only when replicas join an overloaded
deployment. There, each figure the mean over {count} traces, it lowers the mean time to first token
from {stay.mean_s:.1f} s to {move.mean_s:.1f} s, the 95th percentile from {stay.p95_s:.1f} s to
{move.p95_s:.1f} s and the longest wait from {stay.longest_s:.1f} s to {move.longest_s:.1f} s; the
median is {move.median_s:.1f} s instead of {stay.median_s:.1f} s, and
{move.in_time_tokens_per_s:.1f} instead of {stay.in_time_tokens_per_s:.1f} tokens per second are in
time."""


def routing_page(
    tables: Sequence[Table],
    tried: Sequence[Table],
    moving: tuple[TraceMeans, TraceMeans] | None,
    machine: str,
    wall_s: float,
) -> str:
    """`moving`: the means with and without moves of queued requests, beside the tables `tried`."""
    requests = sum(len(table.rows) * table.requests for table in (*tables, *tried))
    sections = [
        ROUTING,
        METHOD,
        f"{machine}\n- {requests:,} requests in all, simulated in {wall_s / 60:.0f} minutes",
        *(f"## {table.scenario.name}\n\n{_table(table)}" for table in tables),
    ]
    if moving is not None:
        move, stay = moving
        sections += ["## What the numbers and the parts are worth", VARIANTS]
        sections += [fill(MOVING.format(count=TRACES, move=move, stay=stay), 100)]
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
