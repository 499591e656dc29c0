"""The application of most tests, and programs that run beside the tests."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ollama
import openai
import pytest

from tests.loopback import free_port
from tests.patience import HANG_S
from tests.serve.application import (
    Application,
    arguments,
    await_http,
    deploy,
    ray_cluster,
    replicas_of,
)
from tests.serve.fragile_replicas import FragileDeployment
from tests.serve.node_scaling import node_scaling_report
from tests.serve.nodes import Nodes
from tests.serve.quickstart import quickstart_report

# Of every cluster: workers precede the other tests of `make test`, and start when they are needed.
os.environ |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
# Agents look at all processes of their node for Ray's dashboard, which no test opens.
os.environ |= {"REPORTER_UPDATE_INTERVAL_MS": "600000"}

# By the fixtures that return their reports. Each has a cluster of its own.
PROGRAMS = {
    "node_scaling": node_scaling_report,
    "quickstart": quickstart_report,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/serve/" in item.path.as_posix():
            item.add_marker(pytest.mark.serve)
    items.sort(key=lambda item: bool(programs_of(item)))


def programs_of(item: pytest.Item) -> set[str]:
    return PROGRAMS.keys() & set(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="package")
def port() -> int:
    """Of the proxy."""
    return free_port()


@pytest.fixture(scope="package")
def nodes(port: int) -> Iterator[Nodes]:
    """Of the cluster of most tests."""
    with ray_cluster(port) as nodes:
        yield nodes


@pytest.fixture(scope="package")
def application(nodes: Nodes, port: int) -> Iterator[Application]:
    with replicas_of(FragileDeployment):
        application = deploy({**arguments(), "responses": {"replicas": 2}}, port)
        await_http(application.url)
        yield application


@pytest.fixture(scope="package", autouse=True)
def programs(
    request: pytest.FixtureRequest, application: Application
) -> Iterator[Mapping[str, Future[dict[str, Any]]]]:
    """The programs that tests need, one after the other while other tests wait for replicas."""
    needed = set().union(*map(programs_of, request.session.items))
    pool = ThreadPoolExecutor(1)
    try:
        yield {name: pool.submit(PROGRAMS[name]) for name in sorted(needed)}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="package")
def node_scaling(programs: Mapping[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return programs["node_scaling"].result()


@pytest.fixture(scope="package")
def quickstart(programs: Mapping[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return programs["quickstart"].result()


@pytest.fixture
def native(application: Application) -> ollama.Client:
    return ollama.Client(host=application.url, timeout=HANG_S)


@pytest.fixture
def oai(application: Application) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{application.url}/v1",
        api_key="unused",
        timeout=HANG_S,
        max_retries=0,
    )
