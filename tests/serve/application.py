"""The demo model behind a real Serve, for tests that need processes and sockets."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import ray
from ray import serve

from runtime.engine import EngineStatistics
from serve_app.app import build
from serve_app.card import ModelCard

ROOT = Path(__file__).parents[2]
NAME = "caravan"
CALL_TIMEOUT_S = 20.0
# Options for long answers: so hot that the end token is one of hundreds of equals.
ENDLESS = {"temperature": 1e6, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True, slots=True)
class Application:
    """A running application."""

    url: str

    def statistics(self) -> EngineStatistics:
        return self._call("statistics")

    def card(self) -> ModelCard:
        return self._call("describe")

    def _call(self, method: str) -> Any:
        handle = serve.get_deployment_handle("demo", NAME).options(method_name=method)
        return handle.remote().result(timeout_s=CALL_TIMEOUT_S)


def arguments(**model: Any) -> dict[str, Any]:
    demo = {
        "name": "demo",
        "source": str(ROOT / "models" / "demo.gguf"),
        "context_tokens": 512,
        "max_sequences": 32,
        "device": "cpu",
    }
    return {"models": [{**demo, **model}]}


@contextmanager
def ray_cluster(port: int) -> Iterator[None]:
    """Ray and Serve as configs/quickstart.yaml has them, on ports that nobody else uses."""
    with environment():
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
        )
        try:
            with serving(port):
                yield
        finally:
            ray.shutdown()


@contextmanager
def environment() -> Iterator[None]:
    """What Ray's processes inherit, with a model store of their own."""
    own = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    with TemporaryDirectory() as store, _environment({**own, "CARAVAN_MODELS": store}):
        yield


@contextmanager
def serving(port: int) -> Iterator[None]:
    """Serve on the Ray cluster that this process is connected to."""
    variables = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        # A proxy that is slow to start, as on a busy machine, is not started again and again.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "50",
    }
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": port},
            controller_options={"runtime_env": {"env_vars": variables}},
        )
        yield
    finally:
        serve.shutdown()


def deploy(args: Mapping[str, Any], port: int) -> Application:
    serve.run(build(dict(args)), name=NAME, route_prefix="/")
    return Application(f"http://127.0.0.1:{port}")


@contextmanager
def short_folder() -> Iterator[Path]:
    """For Ray's files: it puts sockets there, whose paths may not be long."""
    with TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Wait until it holds; an exception counts as "not yet"."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "the condition has not come true in time"
        time.sleep(0.05)


def await_http(url: str, *, timeout_s: float = 30.0) -> None:
    """The proxy learns of a new application a moment after the application is up."""
    eventually(
        lambda: httpx.get(f"{url}/healthz", timeout=5).status_code == 200, timeout_s=timeout_s
    )


@contextmanager
def _environment(change: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in change}
    os.environ.update(change)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
