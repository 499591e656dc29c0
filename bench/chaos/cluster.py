"""A Ray cluster of several nodes on this machine that runs the configured application."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ReplicaState

from serve_app.app import build
from serve_app.cli.serve import SERVE_ENVIRONMENT
from serve_app.haproxy import BINARY_VARIABLE, COMMAND
from tests.checkout import ROOT
from tests.loopback import free_port

NAME = "chaos"
FIRST_WAITING = 512
STORE_BYTES = 80 * 2**20
START_TIMEOUT_S = 120.0
VARIABLES = SERVE_ENVIRONMENT | {BINARY_VARIABLE: str(Path(sys.executable).with_name(COMMAND))}
PORTS = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT")


@dataclass(frozen=True, slots=True)
class Size:
    """`nodes`: the number of nodes besides the head node, which runs the proxy. Without encoders,
    replicas encode images."""

    nodes: int
    replicas: int
    ingresses: int
    encoders: int = 0


@dataclass(slots=True)
class ChaosCluster:
    """The running cluster."""

    url: str
    nodes: Cluster
    size: Size

    def lose_a_node(self, r: random.Random) -> None:
        """Kills all processes of a node, then starts another node."""
        node = r.choice(sorted(self.nodes.worker_nodes, key=lambda node: node.unique_id))
        raylets = [each.process.pid for each in node.all_processes["raylet"]]
        for pid in [pid for raylet in raylets for pid in (raylet, *descendants(raylet))]:
            os.kill(pid, signal.SIGKILL)
        self.nodes.remove_node(node, allow_graceful=False)
        _add_node(self.nodes)

    def running(self, deployment: str) -> int:
        """The number of running replicas of the deployment, as far as Serve knows."""
        states = serve.status().applications[NAME].deployments[deployment].replica_states
        return states.get(ReplicaState.RUNNING, 0)

    def is_whole(self) -> bool:
        """Whether all replicas of all deployments run, as far as Serve knows."""
        deployments = serve.status().applications[NAME].deployments.values()
        return all(set(each.replica_states) == {ReplicaState.RUNNING} for each in deployments)

    def await_answers(self) -> None:
        """Waits until the server answers HTTP."""
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > end:
                raise TimeoutError(f"nothing answers at {self.url}")
            time.sleep(0.1)


@contextmanager
def running_cluster(model: Path, size: Size) -> Iterator[ChaosCluster]:
    with TemporaryDirectory() as store, _cluster(store, size.nodes) as nodes:
        port = free_port()
        ports = {f"RAY_SERVE_{name}": str(free_port()) for name in PORTS}
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": "127.0.0.1", "port": port},
                controller_options={"runtime_env": {"env_vars": VARIABLES | ports}},
            )
            deploy(model, size)
            built = ChaosCluster(f"http://127.0.0.1:{port}", nodes, size)
            built.await_answers()
            yield built
        finally:
            serve.shutdown()


def deploy(model: Path, size: Size, *, max_waiting: int = FIRST_WAITING) -> None:
    """Deploys the application and waits until all of it runs. Another `max_waiting` replaces all
    replicas, but does not affect what is measured."""
    demo: dict[str, Any] = {"name": "demo", "source": str(model), "device": "cpu"}
    demo |= {"replicas": size.replicas, "num_cpus": 0.5, "threads": 1, "max_sequences": 64}
    demo |= {"max_waiting": max_waiting}
    if size.encoders:
        pool = {"placement": "pool", "replicas": size.encoders, "num_cpus": 0.5, "threads": 1}
        demo["vision"] = pool
    # More retries than the default, because replicas are lost all the time.
    arguments = {"ingress_replicas": size.ingresses, "failover": {"max_retries": 20}}
    serve.run(build({"models": [demo], **arguments}), name=NAME, route_prefix="/")


@contextmanager
def _cluster(store: str, count: int) -> Iterator[Cluster]:
    os.environ.update(PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0", CARAVAN_MODELS=store)
    os.environ.setdefault("RAY_worker_niceness", "0")  # as `make serve` sets it
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count):
            _add_node(nodes)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def _add_node(nodes: Cluster) -> None:
    nodes.add_node(num_cpus=2, object_store_memory=STORE_BYTES)


def descendants(ancestor: int, wanted: Callable[[str], bool] = lambda title: True) -> list[int]:
    """The ids of all descendants whose title is wanted, nearest first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        parent = _parent(path)
        if parent is not None:
            children.setdefault(parent, []).append(int(path.name))
    found, look = [], [ancestor]
    while look:
        below = children.get(look.pop(0), [])
        look += below
        found += below
    return [pid for pid in found if wanted(_title(pid))]


def _parent(process: Path) -> int | None:
    try:
        stat = (process / "stat").read_text()
    except OSError:
        return None  # it has ended
    return int(stat.rpartition(")")[2].split()[1])


def _title(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (OSError, UnicodeDecodeError):
        return ""
