"""The state of the Ray cluster that this process belongs to."""

import asyncio

import ray
from ray import serve

from serve_app.gateway.schedulability import ClusterView

RUNNING, STARTING = "RUNNING", "STARTING"


class RayCluster:
    """Reads the cluster's state in a replica of the application."""

    def __init__(self) -> None:
        self._application = serve.get_replica_context().app_name

    async def view(self) -> ClusterView:
        return await asyncio.to_thread(self._view)

    async def metrics_urls(self) -> list[str]:
        """URLs at which Ray's agent of each node exports the metrics of its processes."""
        return await asyncio.to_thread(_metrics_urls)

    def _view(self) -> ClusterView:
        status = serve.status().applications.get(self._application)
        deployments = {} if status is None else status.deployments
        # Declared as members of an enumeration, but Serve returns their values.
        states = {
            name: {
                str(getattr(state, "value", state)): n for state, n in each.replica_states.items()
            }
            for name, each in deployments.items()
        }
        return ClusterView(
            nodes=[node["Resources"] for node in ray.nodes() if node["Alive"]],
            free=ray.available_resources(),
            running={name: each.get(RUNNING, 0) for name, each in states.items()},
            starting={name: each.get(STARTING, 0) for name, each in states.items()},
            messages={name: each.message for name, each in deployments.items()},
        )


def _metrics_urls() -> list[str]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = (node["NodeManagerAddress"] for node in alive)
    hosts = (f"[{host}]" if ":" in host else host for host in hosts)
    ports = (node["MetricsExportPort"] for node in alive)
    return [f"http://{host}:{port}/metrics" for host, port in zip(hosts, ports, strict=True)]
