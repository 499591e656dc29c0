"""Serve's request router of deployments whose replicas are called by name."""

import random
from typing import Any
from weakref import WeakValueDictionary

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# The routers by application and deployment. Serve constructs them, so the list of a deployment's
# replicas is found here.
routers: WeakValueDictionary[tuple[str, str], "ListingRouter"] = WeakValueDictionary()


class ListingRouter(RequestRouter):
    """Routes control calls only. Its list of running replicas is what `ReplicaSet` chooses from and
    what `NamedReplicas` calls."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with the `request_router_kwargs` of the deployment."""
        # Serve pickles this class by value, with copies of the globals that it refers to, so the
        # registry is imported here.
        from serve_app.routing.listing_router import routers

        routers[self.app_name, kwargs["deployment"]] = self

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that the call names as its session; for other calls first two random
        replicas, then all replicas if those two are full."""
        if pending_request is not None:
            repeated = pending_request.routing_context.should_backoff
            pending_request.routing_context.should_backoff = True
            if name := pending_request.metadata.session_id:
                named = [each for each in candidate_replicas if each.replica_id.unique_id == name]
                if not repeated:
                    self._note_space(named)
                return [named]
        first = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        return [first, candidate_replicas]

    def _note_space(self, replicas: list[RunningReplica]) -> None:
        """Lets calls be sent to the replicas without asking for the lengths of their queues. Calls
        to a replica that hangs would otherwise occupy all tasks that route calls."""
        for each in replicas:
            if self.replica_queue_len_cache.get(each.replica_id) is None:
                self.on_new_queue_len_info(each.replica_id, 0)


def router_config(deployment: str) -> dict[str, Any]:
    """The `request_router_config` of a deployment of this name."""
    return {
        "request_router_class": f"{__name__}.{ListingRouter.__name__}",
        "request_router_kwargs": {"deployment": deployment},
    }
