"""An application with two replicas of the demo model, for tests that kill or replace them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve

from runtime.errors import ReplicaLostError
from serve_app.app import build
from serve_app.routing.named_replicas import NamedReplicas
from tests.patience import until
from tests.serve.application import Application, arguments, await_http, call_replicas, eventually
from tests.serve.fragile_replicas import ReplicaReport

NAME, PATH = "pair", "/pair"
REPLICAS = 2
MAX_RETRIES = 2


@contextmanager
def running(application: Application) -> Iterator[str]:
    """Yields the URL. The replicas are fragile, as the deployment of `application` is."""
    try:
        deploy()
        await_http(f"{application.url}{PATH}")
        yield f"{application.url}{PATH}"
    finally:
        serve.delete(NAME, _blocking=False)


def deploy(**change: Any) -> None:
    """Steps are so short that prompts need many."""
    limits = {"max_sequences": 8, "step_tokens": 8, "threads": 1, "num_cpus": 0.1}
    args = arguments(**{"replicas": REPLICAS, "context_tokens": 1024, **limits, **change})
    args["failover"] = {"max_retries": MAX_RETRIES}
    serve.run(build(args), name=NAME, route_prefix=PATH)


def call(method: str, *args: Any) -> list[Any]:
    """The results of all replicas, as soon as Serve lists none that has just died."""
    results: list[Any] = []

    def answered() -> bool:
        results[:] = call_replicas(method, *args, application=NAME)
        return True

    eventually(answered)
    return results


def reports() -> list[ReplicaReport]:
    return call("report")


def both_run() -> bool:
    return len({report.pid for report in reports()}) == REPLICAS


async def pids_of(replicas: NamedReplicas) -> dict[str, int]:
    """The process ids of both replicas by name, once Serve lists them and each answers."""

    async def both() -> bool:
        found.clear()
        for name in replicas.names:
            try:
                found[name] = (await replicas.call(name, "describe")).pid
            except ReplicaLostError:  # a test before this one has killed it
                return False
        return len(found) == 2

    found: dict[str, int] = {}
    await until(both)
    return found
