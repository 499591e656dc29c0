"""Control calls to single replicas of a deployment, by name."""

import asyncio
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from runtime.errors import CaravanError, ModelUnavailableError, ReplicaLostError
from serve_app.routing.listing_router import routers
from serve_app.routing.replica_calls import outside_request

CHECK_S = 0.2
# How long a replica that Serve does not list any more has to finish a call.
FINISH_S = 2.0


class NamedReplicas:
    """The replicas behind a handle to a deployment with a `router_config`.

    A broadcast of Serve is not used: it returns when all replicas have answered, so that one that
    hangs delays the answers of the others.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options()  # connects it, so that Serve lists its replicas
        self._name = handle.app_name, handle.deployment_name

    @property
    def names(self) -> list[str]:
        """Those of the running replicas, as far as Serve knows."""
        router = routers.get(self._name)
        listed = () if router is None else list(router.curr_replicas.values())
        return [each.replica_id.unique_id for each in listed]

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        """The answer of one replica. Raises the CaravanError that the method raises; after any
        other exception, or if the replica ends first, ReplicaLostError."""
        handle = self._handle.options(method_name=method, session_id=replica)
        answer = outside_request(handle.remote, *arguments)
        unlisted_s = 0.0
        try:
            while not (await asyncio.wait({answer}, timeout=CHECK_S))[0]:
                unlisted_s = 0.0 if replica in self.names else unlisted_s + CHECK_S
                if unlisted_s > FINISH_S:
                    raise ReplicaLostError(f"replica {replica} ended before it answered {method}")
            return answer.result()
        except CaravanError as error:
            raise _without_ray_traceback(error) from None
        except Exception as error:
            raise ReplicaLostError(
                f"replica {replica} did not answer {method}: {error!r}"
            ) from None
        finally:
            answer.cancel()

    async def await_one(self) -> None:
        """Waits until there is a replica. Serve starts one if there is none. ModelUnavailableError
        if it has given up, because replicas of a new version failed to start."""
        try:
            await outside_request(self._reserve_one)
        except DeploymentUnavailableError:
            _, deployment = self._name
            raise ModelUnavailableError(
                f"deployment '{deployment}' failed to start; `serve status` states the reason"
            ) from None

    async def _reserve_one(self) -> None:
        """Reserves a replica, for which Serve starts one if there is none, and releases it."""
        async with self._handle.choose_replica():
            return


def _without_ray_traceback(error: CaravanError) -> CaravanError:
    """The error that the replica raised; Ray wraps it with the traceback of the other process."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, CaravanError) else error
