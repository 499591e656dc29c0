"""A model whose two ranks are on two nodes of three, one of which is lost."""

import time
from collections.abc import Iterator

import httpx
import pytest
import ray
from ray import serve

from serve_app.app import build
from tests.patience import HANG_S
from tests.serve.application import HEAD_CPUS, Application, arguments, await_http, eventually
from tests.serve.nodes import Nodes

pytestmark = pytest.mark.timeout(2 * HANG_S)  # several waits, one after the other

NAME, PATH = "spread", "/spread"
CPUS = HEAD_CPUS + 1  # of a rank, and of each node but the head, which can host none


@pytest.fixture(scope="module")
def url(application: Application, nodes: Nodes) -> Iterator[str]:
    parallel = {"tensor": 2, "placement": "strict_spread"}
    settings = {**arguments(parallel=parallel, num_cpus=CPUS), "start_timeout_s": HANG_S}
    try:
        for _ in range(2):
            nodes.add(CPUS)
        serve.run(build(settings), name=NAME, route_prefix=PATH)
        await_http(f"{application.url}{PATH}")
        yield f"{application.url}{PATH}"
    finally:
        serve.delete(NAME, _blocking=False)
        nodes.kill_all()


def answer(url: str) -> str:
    options = {"temperature": 0, "num_predict": 16}
    body = {"model": "demo", "prompt": "What is 17 + 25?", "stream": False, "options": options}
    reply = httpx.post(f"{url}/api/generate", json=body, timeout=HANG_S)
    return reply.json()["response"] if reply.status_code == 200 else reply.text


def nodes_of_ranks() -> list[str]:
    """The node of each rank, once they are placed."""
    groups = ray.util.placement_group_table().values()
    (group,) = (
        group
        for group in groups
        if (group["state"], group["strategy"]) == ("CREATED", "STRICT_SPREAD")
    )
    return [*group["bundles_to_node_id"].values()]


def test_ranks_on_two_nodes_answer_as_one_rank(application: Application, url: str) -> None:
    assert answer(url) == answer(application.url) != ""
    placed = nodes_of_ranks()
    assert len(set(placed)) == len(placed) == 2


def test_all_ranks_are_replaced_when_the_node_of_one_is_lost(
    application: Application, url: str, nodes: Nodes
) -> None:
    before, expected = nodes_of_ranks(), answer(application.url)
    nodes.kill(before[1])
    nodes.add(CPUS)
    eventually(lambda: before[1] not in nodes_of_ranks())
    begun = time.monotonic()
    while (again := answer(url)) != expected and time.monotonic() - begun < HANG_S:
        time.sleep(1.0)  # 503 while there is no second node
    assert again == expected
    after = nodes_of_ranks()
    assert len(set(after)) == 2 and before[1] not in after
