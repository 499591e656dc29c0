"""A model whose two ranks are on two nodes, one of which is lost; part of `three_nodes`."""

import time
from typing import Any

import httpx
import ray

from tests.patience import HANG_S
from tests.serve.application import arguments, await_http, deploy, eventually
from tests.serve.nodes import Nodes

MODEL, WHOLE = "divided", "demo"


def settings() -> dict[str, Any]:
    args = arguments(num_cpus=0, threads=1)
    (whole,) = args["models"]
    parallel = {"tensor": 2, "placement": "strict_spread"}
    divided = {**whole, "name": MODEL, "parallel": parallel, "num_cpus": 2}
    return {"models": [whole, divided], "responses": None, "start_timeout_s": HANG_S}


def answer(url: str, model: str) -> str:
    options = {"temperature": 0, "num_predict": 16}
    body = {"model": model, "prompt": "What is 17 + 25?", "stream": False, "options": options}
    reply = httpx.post(f"{url}/api/generate", json=body, timeout=HANG_S)
    return reply.json()["response"] if reply.status_code == 200 else reply.text


def nodes_of_groups() -> list[list[str]]:
    """The nodes of the bundles of each placement group that exists."""
    groups = ray.util.placement_group_table().values()
    created = [group for group in groups if group["state"] == "CREATED"]
    return [[*group["bundles_to_node_id"].values()] for group in created]


def scenario(url: str, nodes: Nodes) -> dict[str, Any]:
    whole, divided = answer(url, WHOLE), answer(url, MODEL)
    (before,) = nodes_of_groups()
    nodes.replace(before[1])
    eventually(lambda: nodes_of_groups() and before[1] not in nodes_of_groups()[0])
    begun = time.monotonic()
    again = answer(url, MODEL)
    while again != divided and time.monotonic() - begun < HANG_S:
        time.sleep(1.0)  # 503 while there is no second node
        again = answer(url, MODEL)
    return {
        "whole": whole,
        "divided": divided,
        "again": again,
        "nodes": [before, *nodes_of_groups()],
    }


def report(port: int, nodes: Nodes) -> dict[str, Any]:
    application = deploy(settings(), port)
    await_http(application.url)
    return scenario(application.url, nodes)
