"""What Ray and Serve tell about the cluster that this process is part of."""

import asyncio

import ray
from ray import serve

from serve_app.gateway.schedulability import View

RUNNING, STARTING = "RUNNING", "STARTING"


class RayCluster:
    """Seen from a replica of the application."""

    def __init__(self) -> None:
        self._application = serve.get_replica_context().app_name

    async def look(self) -> View:
        return await asyncio.to_thread(self._look)

    def _look(self) -> View:
        status = serve.status().applications.get(self._application)
        deployments = {} if status is None else status.deployments
        # Serve declares members of an enumeration and gives their values.
        states = {
            name: {
                str(getattr(state, "value", state)): n for state, n in each.replica_states.items()
            }
            for name, each in deployments.items()
        }
        return View(
            nodes=[node["Resources"] for node in ray.nodes() if node["Alive"]],
            free=ray.available_resources(),
            running={name: each.get(RUNNING, 0) for name, each in states.items()},
            starting={name: each.get(STARTING, 0) for name, each in states.items()},
            told={name: each.message for name, each in deployments.items()},
        )
