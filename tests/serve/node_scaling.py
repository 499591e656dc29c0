"""A model that is scaled from zero and back on a cluster that grows by one node: three replicas are
wanted, two fit.

A program for `report_of`. The model computes on the CPU: the nodes' GPUs are resources of Ray that
no device has.
"""

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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
    call_replicas,
    deploy,
    environment,
    eventually,
    replicas_of,
    report_of,
    serve_variables,
    serving,
)
from tests.serve.congested_replicas import CongestedDeployment
from tests.serve.fake_nodes import autoscaled_cluster, cluster_environment

# Of each node. A replica needs one GPU: one fits on each, though there are CPUs for more.
CPUS, GPUS = 2, 1
REPLICAS, FITTING = 3, 2
BURST = 24  # more than all replicas run at once
WORDS = "What is the sum of seven and ten, and what is the day after a Monday in May? "
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
FULL: Counts = (FITTING, 1, 2)


def node_scaling_report() -> dict[str, Any]:
    return report_of(__name__, timeout_s=LIMIT_S, **cluster_environment())


class Watch:
    """`seen`: each change of: replicas that run, replicas that start, nodes that are alive;
    `answering`: the nodes of replicas that have answered a request, by their processes."""

    def __init__(self) -> None:
        self.seen: list[Counts] = []
        self.answering: dict[int, str] = {}
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=each) for each in (self._watch_counts, self._watch_answers)
        ]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _watch_counts(self) -> None:
        while not self._done.wait(0.25):
            states = serve.status().applications[NAME].deployments["demo"].replica_states
            nodes = sum(node["Alive"] for node in ray.nodes())
            counts = states.get("RUNNING", 0), states.get("STARTING", 0), nodes
            if not self.seen or counts != self.seen[-1]:
                self.seen.append(counts)

    def _watch_answers(self) -> None:
        while not self._done.wait(0.5):
            with suppress(Exception):  # no replica runs, or one has just ended
                self.answering |= dict(each for each in call_replicas("answering") if each)


def _body(prompt: str) -> dict[str, Any]:
    options = {"num_predict": 4, "temperature": 0, "seed": 1}
    return {"model": "demo", "prompt": prompt, "raw": True, "stream": False, "options": options}


async def _burst(url: str, enough: Callable[[], bool]) -> list[int]:
    """Long prompts at once, no two with a common prefix; returns the status codes. Replicas are
    relieved once there have been `enough`."""
    async with httpx.AsyncClient(timeout=HANG_S) as client, asyncio.TaskGroup() as tasks:
        requests = [
            tasks.create_task(
                client.post(f"{url}/api/generate", json=_body(f"{number}. {20 * WORDS}"))
            )
            for number in range(BURST)
        ]
        await asyncio.to_thread(eventually, enough)
        await asyncio.to_thread(_relieve, FITTING)
    return [request.result().status_code for request in requests]


def _relieve(replicas: int) -> None:
    """All of so many that run, once this process's handle knows them."""
    eventually(lambda: len(call_replicas("relieve")) == replicas)


def _answers(url: str) -> bool:
    """Whether both choices of a request are answered, which wait for the replica at once."""
    body = {"model": "demo", "prompt": WORDS, "n": 2, "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)
    return reply.status_code == 200 and len(reply.json()["choices"]) == 2


def _scenario(url: str) -> dict[str, Any]:
    with Watch() as watch:
        listed = httpx.get(f"{url}/api/tags", timeout=HANG_S).json()
        time.sleep(4 * INTERVAL_S)
        after_listing = list(watch.seen)
        eventually(lambda: _answers(url))
        after_the_first = list(watch.seen)
        watch.answering.clear()  # on a slow machine this replica is idle for too long and ends

        def all_answer() -> bool:
            return FULL in watch.seen and len(watch.answering) == FITTING

        statuses = asyncio.run(_burst(url, all_answer))
        eventually(lambda: watch.seen[-1] == (0, 0, 1))
    return {
        "listed": [model["name"] for model in listed["models"]],
        "after_listing": after_listing,
        "after_the_first": after_the_first,
        "statuses": statuses,
        "nodes_answering": list(watch.answering.values()),
        "seen": watch.seen,
    }


def _report(port: int) -> dict[str, Any]:
    args = arguments(
        num_gpus=1,
        num_cpus=0.5,
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
    nodes = autoscaled_cluster(
        report.parent, cpus=CPUS, gpus=GPUS, most_workers=1, variables=serve_variables()
    )
    with environment(), nodes, serving(port):
        report.write_text(json.dumps(_report(port)))


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not at its end after {LIMIT_S - ENDING_S} s")


if __name__ == "__main__":
    main()
