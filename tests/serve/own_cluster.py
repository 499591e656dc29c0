"""Programs that start a Ray cluster of their own: a process can drive one only."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.serve.application import ROOT

# Minutes where the machine has much else to do.
LIMIT_S = 500


def told_by(module: str) -> dict[str, Any]:
    """What it writes as JSON to the file that it is given.

    Its Ray keeps its files apart from that of the other tests.
    """
    with TemporaryDirectory(prefix="ray") as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", module, str(report)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert report.exists(), done.stderr
        return json.loads(report.read_text())
