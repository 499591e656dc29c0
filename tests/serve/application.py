"""The demo model behind a real Serve, for tests that need processes and sockets."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from pytest import MonkeyPatch
from ray import serve

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.app import build
from serve_app.deployments.model_deployments import ModelDeployment, VisionEncoder
from serve_app.messages.model_card import ModelCard
from serve_app.messages.replica_status import ReplicaStatus
from tests.checkout import DEMO_MODEL, ROOT
from tests.loopback import free_port
from tests.patience import HANG_S
from tests.serve.nodes import Nodes, cluster

NAME = "caravan"
HEAD_CPUS = 4
CALL_TIMEOUT_S = 100.0  # of a control call, where `eventually` may try again
POLL_S = 10.0  # of one request of `await_http`, which repeats it
# Options for long answers: so hot that the end token is one of hundreds of equals.
ENDLESS = {"temperature": 1e6, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True, slots=True)
class Application:
    """A running application."""

    url: str

    def statistics(self) -> EngineStatistics:
        """Of any replica."""
        return engine_of(self._call("status"))

    def card(self) -> ModelCard:
        return self._call("describe")

    def pace(self, step_s: float) -> None:
        """Make each step take at least so long; see `FragileDeployment`."""
        self._call("pace", step_s)

    @contextmanager
    def paced(self, step_s: float) -> Iterator[None]:
        self.pace(step_s)
        try:
            yield
        finally:
            self.pace(0.0)

    def _call(self, method: str, *arguments: Any) -> Any:
        handle = serve.get_deployment_handle("demo", NAME).options(method_name=method)
        return handle.remote(*arguments).result(timeout_s=CALL_TIMEOUT_S)


def engine_of(status: ReplicaStatus) -> EngineStatistics:
    """The statistics of a replica of one model."""
    (engine,) = status.engines.values()
    return EngineStatistics(**engine)  # type: ignore[arg-type]


def call_replicas(
    method: str,
    *args: Any,
    deployment: str = "demo",
    application: str = NAME,
    skip_dead: bool = False,
) -> list[Any]:
    """The results of a method of all replicas, in the same order every time.

    `skip_dead`: leave out replicas that do not answer, instead of raising their error.
    """
    handle = serve.get_deployment_handle(deployment, application)
    replies = handle.broadcast(method, *args)
    results = replies.results(timeout_s=CALL_TIMEOUT_S, return_exceptions=skip_dead)
    return [each for each in results if not isinstance(each, Exception)]


def arguments(**model: Any) -> dict[str, Any]:
    """One model on one thread, since the machine may be busy, and without a store of responses,
    whose processes take time to start."""
    demo = {
        "name": "demo",
        "source": str(DEMO_MODEL),
        "context_tokens": 512,
        "max_sequences": 32,
        "device": "cpu",
        "threads": 1,
    }
    return {"models": [{**demo, **model}], "responses": None}


@contextmanager
def replicas_of(deployment: type[ModelDeployment] | type[VisionEncoder]) -> Iterator[None]:
    """Models, or vision encoders, of applications built meanwhile have replicas of this class."""
    base = ModelDeployment if issubclass(deployment, ModelDeployment) else VisionEncoder
    with MonkeyPatch.context() as patch:
        patch.setattr(f"serve_app.app.{base.__name__}", deployment)
        yield


@contextmanager
def ray_cluster(port: int) -> Iterator[Nodes]:
    """Ray and Serve as in configs/quickstart.yaml, on free ports. Tests may add nodes."""
    with environment(), cluster(HEAD_CPUS, serve_variables()) as nodes, serving(port):
        yield nodes


@contextmanager
def environment() -> Iterator[None]:
    """The environment of Ray's processes and of their clients, with a model store of their own."""
    own = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    # No server has a certificate, and each client would read those of all authorities.
    own |= {"SSL_CERT_FILE": "", "SSL_CERT_DIR": os.devnull}
    with TemporaryDirectory() as store, _environment({**own, "CARAVAN_MODELS": store}):
        yield


def serve_variables() -> dict[str, str]:
    """Variables of Serve, for the environment of the nodes of a cluster.

    In the controller's `runtime_env`, where a configuration has them, they would make each worker
    start Python and import Ray twice: first to set them.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sys.executable).with_name("caravan-haproxy")),
        "CARAVAN_PROXY_SECRET": secrets.token_hex(32),
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        # By default, the controller looks at all replicas ten times a second.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        # A proxy that is slow to start, as on a busy machine, is not started again and again.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "200",
    }


@contextmanager
def serving(port: int) -> Iterator[None]:
    """Serve on the Ray cluster that this process is connected to, whose nodes have
    `serve_variables()`."""
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield
    finally:
        serve.shutdown()


def deploy(args: Mapping[str, Any], port: int) -> Application:
    serve.run(build(dict(args)), name=NAME, route_prefix="/")
    return Application(f"http://127.0.0.1:{port}")


def report_of(module: str, *, timeout_s: float, **variables: str) -> Any:
    """Run a program of the tests and return the JSON that it writes to the file it is given.

    A process can drive one Ray cluster only, so tests that need another cluster are such programs.
    Ray's files are in the folder of that file, and Serve's ports are others than those of the
    cluster that this process drives. `variables`: of the environment.
    """
    ports = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "31001",
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": "32000",
    }
    with short_folder() as folder:
        report = folder / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", module, str(report)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": str(folder), **ports, **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert report.exists(), done.stderr
        return json.loads(report.read_text())


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a short path for Ray, which puts sockets there."""
    with TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def eventually(condition: Callable[[], bool], *, timeout_s: float = HANG_S) -> None:
    """Poll until the condition holds; unlike in `wait_until` it may raise meanwhile."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, f"the condition did not hold within {timeout_s:g} s"
        time.sleep(0.2)


def await_http(url: str) -> None:
    """Wait until the proxy forwards to a new application."""
    eventually(lambda: httpx.get(f"{url}/healthz", timeout=POLL_S).status_code == 200)


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
