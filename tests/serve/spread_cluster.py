"""A model whose two ranks are on two nodes, one of which is lost; told to a file as JSON.

A program of its own, since a process is the driver of one Ray cluster: the tests' own is another.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.serve.application import (
    NAME,
    arguments,
    await_http,
    deploy,
    environment,
    eventually,
    free_port,
    serving,
)

STORE = {"object_store_memory": 80 * 2**20}
TIMEOUT_S = 240.0
MODEL, WHOLE = "divided", "demo"


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Each node but the head has room for one rank."""
    head = {"num_cpus": 1, "include_dashboard": False, **STORE}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            add_node(nodes)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def add_node(nodes: Cluster) -> None:
    nodes.add_node(num_cpus=2, **STORE)


def settings() -> dict[str, Any]:
    args = arguments(num_cpus=0, threads=1)
    (whole,) = args["models"]
    parallel = {"tensor": 2, "placement": "strict_spread"}
    divided = {**whole, "name": MODEL, "parallel": parallel, "num_cpus": 2}
    return {"models": [whole, divided], "start_timeout_s": TIMEOUT_S}


def answer(url: str, model: str) -> str:
    options = {"temperature": 0, "num_predict": 16}
    body = {"model": model, "prompt": "What is 17 + 25?", "stream": False, "options": options}
    reply = httpx.post(f"{url}/api/generate", json=body, timeout=TIMEOUT_S)
    return reply.json()["response"] if reply.status_code == 200 else reply.text


def places() -> list[list[str]]:
    """Of each living placement group, the nodes of its bundles."""
    groups = ray.util.placement_group_table().values()
    created = [group for group in groups if group["state"] == "CREATED"]
    return [[*group["bundles_to_node_id"].values()] for group in created]


def scenario(url: str, nodes: Cluster) -> dict[str, Any]:
    whole, divided = answer(url, WHOLE), answer(url, MODEL)
    (before,) = places()
    lost = next(node for node in nodes.worker_nodes if node.node_id == before[1])
    nodes.remove_node(lost, allow_graceful=False)
    add_node(nodes)
    eventually(lambda: places() and before[1] not in places()[0], timeout_s=TIMEOUT_S)
    begun = time.monotonic()
    again = answer(url, MODEL)
    while again != divided and time.monotonic() - begun < TIMEOUT_S:
        time.sleep(1.0)  # told 503 while there is no second node
        again = answer(url, MODEL)
    return {"whole": whole, "divided": divided, "again": again, "nodes": [before, *places()]}


def main() -> None:
    port = free_port()
    with environment(), cluster() as nodes, serving(port):
        application = deploy(settings(), port)
        await_http(application.url)
        told = scenario(application.url, nodes)
        Path(sys.argv[1]).write_text(json.dumps(told))
        serve.delete(NAME)


if __name__ == "__main__":
    main()
