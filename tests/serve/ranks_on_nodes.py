"""A model whose two ranks are on two nodes of three, one of which is lost.

A program for `report_of`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import ray

from tests.loopback import free_port
from tests.patience import HANG_S
from tests.serve.application import (
    arguments,
    await_http,
    deploy,
    environment,
    eventually,
    report_of,
    serving,
)
from tests.serve.nodes import Nodes, cluster

LIMIT_S = 2 * HANG_S  # several waits, one after the other


def ranks_on_nodes_report() -> dict[str, Any]:
    return report_of(__name__, timeout_s=LIMIT_S)


def settings() -> dict[str, Any]:
    parallel = {"tensor": 2, "placement": "strict_spread"}
    return {**arguments(parallel=parallel, num_cpus=2), "start_timeout_s": HANG_S}


def answer(url: str) -> str:
    options = {"temperature": 0, "num_predict": 16}
    body = {"model": "demo", "prompt": "What is 17 + 25?", "stream": False, "options": options}
    reply = httpx.post(f"{url}/api/generate", json=body, timeout=HANG_S)
    return reply.json()["response"] if reply.status_code == 200 else reply.text


def nodes_of_groups() -> list[list[str]]:
    """The nodes of the bundles of each placement group that exists."""
    groups = ray.util.placement_group_table().values()
    created = [group for group in groups if group["state"] == "CREATED"]
    return [[*group["bundles_to_node_id"].values()] for group in created]


def scenario(url: str, nodes: Nodes) -> dict[str, Any]:
    divided = answer(url)
    (before,) = nodes_of_groups()
    nodes.replace(before[1])
    eventually(lambda: nodes_of_groups() and before[1] not in nodes_of_groups()[0])
    begun = time.monotonic()
    again = answer(url)
    while again != divided and time.monotonic() - begun < HANG_S:
        time.sleep(1.0)  # 503 while there is no second node
        again = answer(url)
    return {"divided": divided, "again": again, "nodes": [before, *nodes_of_groups()]}


def main() -> None:
    port = free_port()
    with environment(), cluster(workers=2) as nodes, serving(port):
        application = deploy(settings(), port)
        await_http(application.url)
        Path(sys.argv[1]).write_text(json.dumps(scenario(application.url, nodes)))


if __name__ == "__main__":
    main()
