"""What happens on a cluster of three nodes in one machine; a program for `report_of`."""

import json
import sys
from pathlib import Path
from typing import Any

from ray import serve

from tests.loopback import free_port
from tests.patience import HANG_S
from tests.serve import elastic, spread
from tests.serve.application import NAME, environment, report_of, serving
from tests.serve.nodes import cluster

LIMIT_S = 3 * HANG_S  # several waits, one after the other


def all_told() -> dict[str, dict[str, Any]]:
    """By the story's name."""
    return report_of(__name__, timeout_s=LIMIT_S)


def main() -> None:
    port = free_port()
    with environment(), cluster(elastic.GPUS) as nodes, serving(port):
        told = {"elastic": elastic.told(port)}
        serve.delete(NAME)
        told["spread"] = spread.told(port, nodes)
        serve.delete(NAME)
        Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
