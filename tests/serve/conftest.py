"""One application for all tests that only send requests to it."""

from collections.abc import Iterator
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
)
from tests.serve.fragile_replicas import fragile_replicas
from tests.serve.three_nodes import three_nodes_report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/serve/" in item.path.as_posix():
            item.add_marker(pytest.mark.serve)


@pytest.fixture(scope="package")
def application() -> Iterator[Application]:
    port = free_port()
    with ray_cluster(port), fragile_replicas():
        application = deploy(arguments(), port)
        await_http(application.url)
        yield application


@pytest.fixture(scope="package")
def three_nodes() -> dict[str, dict[str, Any]]:
    return three_nodes_report()


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
