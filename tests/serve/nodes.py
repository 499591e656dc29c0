"""Several Ray nodes in one machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

STORE = {"object_store_memory": 80 * 2**20}


class Nodes:
    """The workers of a cluster, each with two CPUs."""

    def __init__(self, cluster: Cluster, workers: int) -> None:
        self._cluster = cluster
        for _ in range(workers):
            self._add()

    def replace(self, node: str) -> None:
        """Kill a node without a graceful stop and add one."""
        lost = next(each for each in self._cluster.worker_nodes if each.node_id == node)
        self._cluster.remove_node(lost, allow_graceful=False)
        self._add()

    def _add(self) -> None:
        self._cluster.add_node(num_cpus=2, num_gpus=0, **STORE)


@contextmanager
def cluster(workers: int) -> Iterator[Nodes]:
    """This process drives it. The head has one CPU."""
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, **STORE}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        added = Nodes(nodes, workers)
        ray.init(address=nodes.address, log_to_driver=False)
        yield added
    finally:
        ray.shutdown()
        nodes.shutdown()
