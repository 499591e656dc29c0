"""Several Ray nodes in one machine; the workers' GPUs are resources of Ray without devices."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

STORE = {"object_store_memory": 80 * 2**20}


class Nodes:
    """The workers of a cluster, each with two CPUs and so many GPUs."""

    def __init__(self, cluster: Cluster, gpus: Sequence[int]) -> None:
        self._cluster = cluster
        for count in gpus:
            self._add(count)

    def replace(self, node: str) -> None:
        """Kill a node without a graceful stop and add one without GPUs."""
        lost = next(each for each in self._cluster.worker_nodes if each.node_id == node)
        self._cluster.remove_node(lost, allow_graceful=False)
        self._add(gpus=0)

    def _add(self, gpus: int) -> None:
        self._cluster.add_node(num_cpus=2, num_gpus=gpus, **STORE)


@contextmanager
def cluster(gpus: Sequence[int]) -> Iterator[Nodes]:
    """This process drives it. The head has one CPU and none of the GPUs."""
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, **STORE}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        workers = Nodes(nodes, gpus)
        ray.init(address=nodes.address, log_to_driver=False)
        yield workers
    finally:
        ray.shutdown()
        nodes.shutdown()
