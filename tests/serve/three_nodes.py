"""Scenarios on a cluster of three nodes in one machine; a program for `report_of`."""

import json
import sys
from pathlib import Path
from typing import Any

from ray import serve

from tests.loopback import free_port
from tests.patience import HANG_S
from tests.serve import ranks_on_nodes, scaling_on_nodes
from tests.serve.application import NAME, environment, report_of, serving
from tests.serve.nodes import cluster

LIMIT_S = 3 * HANG_S  # several waits, one after the other


def three_nodes_report() -> dict[str, dict[str, Any]]:
    """The report of each scenario: "scaling" and "ranks"."""
    return report_of(__name__, timeout_s=LIMIT_S)


def main() -> None:
    port = free_port()
    with environment(), cluster(scaling_on_nodes.GPUS) as nodes, serving(port):
        report = {"scaling": scaling_on_nodes.report(port)}
        serve.delete(NAME)
        report["ranks"] = ranks_on_nodes.report(port, nodes)
        serve.delete(NAME)
        Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
