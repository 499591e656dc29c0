"""Several Ray nodes in one machine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

STORE = {"object_store_memory": 80 * 2**20}


class Nodes:
    """The nodes of a cluster besides its head."""

    def __init__(self, cluster: Cluster, variables: Mapping[str, str]) -> None:
        self._cluster, self._variables = cluster, dict(variables)

    def add(self, cpus: int) -> None:
        self._cluster.add_node(num_cpus=cpus, num_gpus=0, env_vars=self._variables, **STORE)

    def kill(self, node: str) -> None:
        """Without a graceful stop."""
        lost = next(each for each in self._cluster.worker_nodes if each.node_id == node)
        self._cluster.remove_node(lost, allow_graceful=False)

    def kill_all(self) -> None:
        for node in list(self._cluster.worker_nodes):
            self.kill(node.node_id)


@contextmanager
def cluster(cpus: int, variables: Mapping[str, str]) -> Iterator[Nodes]:
    """This process drives it, and prints no logs of its workers. The head has so many CPUs.
    `variables`: of the environment of all workers."""
    lacking = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": cpus,
            "num_gpus": 0,
            "env_vars": dict(variables),
            **lacking,
            **STORE,
        },
    )
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        yield Nodes(nodes, variables)
    finally:
        ray.shutdown()
        nodes.shutdown()
