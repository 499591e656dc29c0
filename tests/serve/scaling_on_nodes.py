"""A model that is scaled from zero and back on three nodes; part of `three_nodes`.

It computes on the CPU: the nodes' GPUs are resources of Ray that no device has.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import ray
from ray import serve

from tests.patience import HANG_S
from tests.serve.application import (
    NAME,
    arguments,
    await_http,
    call_replicas,
    deploy,
    eventually,
    replicas_of,
)
from tests.serve.congested_replicas import CongestedDeployment, relieve

GPUS = (1, 2)  # of the nodes beside the head
REPLICAS = 3
BURST = 24  # more than all replicas run at once
WORDS = "What is the sum of seven and ten, and what is the day after a Monday in May? "
INTERVAL_S = 0.25
AUTOSCALING = {
    "min_replicas": 0,
    "max_replicas": REPLICAS,
    "target_queue_s": 0.2,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 2.0,
    "metrics_interval_s": INTERVAL_S,
}


class ReplicaCounts:
    """Watches a model: `counts` of its running and starting replicas, one for each change; the
    fewest GPUs that were free; the processes of replicas that have answered a request."""

    def __init__(self) -> None:
        self.counts: list[int] = [0]
        self.free_gpus = float(sum(GPUS))
        self.answering: set[int] = set()
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=each) for each in (self._watch_counts, self._watch_answers)
        ]

    def __enter__(self) -> "ReplicaCounts":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _watch_answers(self) -> None:
        while not self._done.wait(0.3):
            with suppress(Exception):  # no replica runs, or one has just ended
                cards, figures = (call_replicas(name) for name in ("describe", "statistics"))
                each = zip(cards, figures, strict=True)
                self.answering |= {card.pid for card, now in each if now.completion_tokens_total}

    def _watch_counts(self) -> None:
        while not self._done.wait(0.2):
            states = serve.status().applications[NAME].deployments["demo"].replica_states
            count = states.get("STARTING", 0) + states.get("RUNNING", 0)
            if count != self.counts[-1]:
                self.counts.append(count)
            self.free_gpus = min(self.free_gpus, ray.available_resources().get("GPU", 0.0))


def ask(url: str, words: str) -> httpx.Response:
    return httpx.post(f"{url}/api/generate", json=body(words), timeout=HANG_S)


def body(words: str) -> dict[str, Any]:
    options = {"num_predict": 4, "temperature": 0, "seed": 1}
    return {"model": "demo", "prompt": words, "raw": True, "stream": False, "options": options}


async def burst(url: str, all_answer: Callable[[], bool]) -> list[int]:
    """Long prompts at once, no two with a common prefix; returns the status codes. Replicas are
    relieved when `all_answer`."""
    async with httpx.AsyncClient(timeout=HANG_S) as client, asyncio.TaskGroup() as tasks:
        requests = [
            tasks.create_task(
                client.post(f"{url}/api/generate", json=body(f"{number}. {20 * WORDS}"))
            )
            for number in range(BURST)
        ]
        await asyncio.to_thread(eventually, all_answer)
        await asyncio.to_thread(relieve, REPLICAS)
    return [request.result().status_code for request in requests]


def scenario(url: str) -> dict[str, Any]:
    with ReplicaCounts() as replicas:
        listed = httpx.get(f"{url}/api/tags", timeout=HANG_S).json()
        time.sleep(4 * INTERVAL_S)
        after_listing = list(replicas.counts)
        first = ask(url, WORDS)
        after_the_first = list(replicas.counts)
        statuses = asyncio.run(burst(url, lambda: len(replicas.answering) == REPLICAS))
        eventually(lambda: replicas.counts[-1] == 0)
    return {
        "first_answer": {"status": first.status_code, **first.json()},
        "listed": [model["name"] for model in listed["models"]],
        "after_listing": after_listing,
        "after_the_first": after_the_first,
        "statuses": statuses,
        "free_gpus": replicas.free_gpus,
        "answering": len(replicas.answering),
        "counts": replicas.counts,
    }


def report(port: int) -> dict[str, Any]:
    args = arguments(
        num_gpus=1,
        num_cpus=0.5,
        threads=1,
        max_sequences=4,
        step_tokens=16,
        context_tokens=1024,
        autoscaling=AUTOSCALING,
    )
    args["start_timeout_s"] = HANG_S
    with replicas_of(CongestedDeployment):
        application = deploy(args, port)
    await_http(application.url)
    return scenario(application.url)
