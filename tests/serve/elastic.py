"""A model that comes and goes on a cluster of three nodes, for `three_nodes`.

It computes on the CPU: the nodes' GPUs exist in Ray's books alone.
"""

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import httpx
import ray
from ray import serve

from tests.patience import HANG_S
from tests.serve.application import (
    CALL_TIMEOUT_S,
    NAME,
    arguments,
    await_http,
    deploy,
    eventually,
)

GPUS = (1, 2)  # of the nodes beside the head
REPLICAS = 3
BURST = 160  # so many that it lasts for longer than replicas take to start
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


class Census:
    """How many replicas there are and start, each time that this changes; the fewest GPUs that were
    free; and the processes of those that have begun an answer."""

    def __init__(self) -> None:
        self.counts: list[int] = [0]
        self.free_gpus = float(sum(GPUS))
        self.answering: set[int] = set()
        self._done = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._watch, self._ask)]

    def __enter__(self) -> "Census":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._done.wait(0.3):
            with suppress(Exception):  # there is none, or one that has just gone
                handle = serve.get_deployment_handle("demo", NAME)
                cards, figures = (
                    handle.broadcast(method).results(timeout_s=CALL_TIMEOUT_S)
                    for method in ("describe", "statistics")
                )
                each = zip(cards, figures, strict=True)
                self.answering |= {card.pid for card, now in each if now.first_tokens_total}

    def _watch(self) -> None:
        while not self._done.wait(0.05):
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


async def burst(url: str) -> list[int]:
    """Long prompts, all at once; none begins like another."""
    async with httpx.AsyncClient(timeout=HANG_S) as client:
        asked = [
            client.post(f"{url}/api/generate", json=body(f"{number}. {20 * WORDS}"))
            for number in range(BURST)
        ]
        return [response.status_code for response in await asyncio.gather(*asked)]


def scenario(url: str) -> dict[str, Any]:
    with Census() as census:
        listed = httpx.get(f"{url}/api/tags", timeout=HANG_S).json()
        time.sleep(4 * INTERVAL_S)
        after_listing = list(census.counts)
        woken = ask(url, WORDS)
        after_waking = list(census.counts)
        statuses = asyncio.run(burst(url))
        eventually(lambda: census.counts[-1] == 0)
    return {
        "woken": {"status": woken.status_code, **woken.json()},
        "listed": [model["name"] for model in listed["models"]],
        "after_listing": after_listing,
        "after_waking": after_waking,
        "statuses": statuses,
        "free_gpus": census.free_gpus,
        "answering": len(census.answering),
        "counts": census.counts,
    }


def told(port: int) -> dict[str, Any]:
    args = arguments(
        num_gpus=1,
        num_cpus=0.5,
        threads=1,
        max_sequences=4,
        step_tokens=16,  # so small that the burst takes its time on any machine
        context_tokens=1024,
        autoscaling=AUTOSCALING,
    )
    args["start_timeout_s"] = HANG_S
    application = deploy(args, port)
    await_http(application.url)
    return scenario(application.url)
