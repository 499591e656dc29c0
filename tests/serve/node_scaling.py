"""A model under load on a cluster that grows by one node: three replicas are wanted, two fit.

A program for `report_of`."""

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from tests.loopback import free_port
from tests.patience import HANG_S
from tests.serve.application import (
    NAME,
    arguments,
    await_http,
    deploy,
    environment,
    eventually,
    replicas_of,
    report_of,
    serving,
)
from tests.serve.congested_replicas import CongestedDeployment, relieve
from tests.serve.fake_nodes import autoscaled_cluster, cluster_environment
from tests.serve.scaling_on_nodes import WORDS, body

# Of each node, and of a replica: one fits on each.
CPUS = 2
REPLICAS, FITTING = 3, 2
CLIENTS = 12  # more than both replicas that fit run at once
INTERVAL_S = 0.25
AUTOSCALING = {
    "min_replicas": 0,
    "max_replicas": REPLICAS,
    "target_queue_s": 0.2,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 3.0,
    "downscale_to_zero_delay_s": 5.0,
    "metrics_interval_s": INTERVAL_S,
}
# The pending replica exceeds it; a request that waits longer for the first one is repeated.
START_TIMEOUT_S = 10.0
# Minutes where the machine has much else to do. The program ends by itself before that, because
# only then it ends the cluster too.
LIMIT_S = 900
ENDING_S = 120

Counts = tuple[int, int, int]


def node_scaling_report() -> dict[str, Any]:
    return report_of(__name__, timeout_s=LIMIT_S, **cluster_environment())


class Watch:
    """Each change of: replicas that run, replicas that start, nodes that are alive."""

    def __init__(self) -> None:
        self.seen: list[Counts] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            states = serve.status().applications[NAME].deployments["demo"].replica_states
            nodes = sum(node["Alive"] for node in ray.nodes())
            counts = states.get("RUNNING", 0), states.get("STARTING", 0), nodes
            if not self.seen or counts != self.seen[-1]:
                self.seen.append(counts)


async def _load(url: str, enough: Callable[[], bool]) -> list[int]:
    """Status codes of clients that send one long prompt after the other. Replicas are relieved
    once there have been `enough`."""
    statuses: list[int] = []

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        while not enough():
            prompt = f"{number}. {time.monotonic()} {20 * WORDS}"
            reply = await client.post(f"{url}/api/generate", json=body(prompt))
            statuses.append(reply.status_code)

    limits = httpx.Limits(max_connections=CLIENTS)
    async with (
        httpx.AsyncClient(timeout=HANG_S, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(CLIENTS):
            tasks.create_task(ask(client, number))
        await asyncio.to_thread(eventually, enough)
        await asyncio.to_thread(relieve, FITTING)
    return statuses


def _answers(url: str) -> bool:
    reply = httpx.post(f"{url}/api/generate", json=body(WORDS), timeout=HANG_S)
    return reply.status_code == 200


def _scenario(url: str) -> dict[str, Any]:
    with Watch() as watch:
        eventually(lambda: _answers(url), timeout_s=HANG_S)
        statuses = asyncio.run(_load(url, lambda: (FITTING, 1, 2) in watch.seen))
        eventually(lambda: watch.seen[-1] == (0, 0, 1), timeout_s=HANG_S)
    return {"statuses": statuses, "seen": watch.seen}


def _report(port: int) -> dict[str, Any]:
    args = arguments(
        num_cpus=CPUS,
        threads=1,
        max_sequences=4,
        step_tokens=16,
        context_tokens=1024,
        autoscaling=AUTOSCALING,
    )
    args["start_timeout_s"] = START_TIMEOUT_S
    with replicas_of(CongestedDeployment):
        application = deploy(args, port)
    await_http(application.url)
    return _scenario(application.url)


def main() -> None:
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LIMIT_S - ENDING_S)
    report, port = Path(sys.argv[1]), free_port()
    nodes = autoscaled_cluster(report.parent, cpus=CPUS, most_workers=1)
    with environment(), nodes, serving(port):
        report.write_text(json.dumps(_report(port)))


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not at its end after {LIMIT_S - ENDING_S} s")


if __name__ == "__main__":
    main()
