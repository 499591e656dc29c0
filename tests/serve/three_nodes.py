"""What happens on a cluster of three nodes in one machine, told to a file as JSON.

A program of its own, since a process is the driver of one Ray cluster: the tests' own is another.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray import serve

from tests.serve import elastic, spread
from tests.serve.application import (
    NAME,
    ROOT,
    environment,
    free_port,
    serving,
    short_folder,
)
from tests.serve.nodes import cluster

# Minutes where the machine has much else to do.
LIMIT_S = 500


def all_told() -> dict[str, dict[str, Any]]:
    """By the story's name. Its Ray keeps its files apart from that of the other tests."""
    with short_folder() as folder:
        report = folder / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(report)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert report.exists(), done.stderr
        return json.loads(report.read_text())


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
