"""Runs each section in its own process, within a time limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 570.0  # time limit of a call of the program
_LEAST_S = 5.0  # a section is not started if less time is left
_OUTPUT_CHARACTERS = 3000


@dataclass(frozen=True)
class Section:
    """module: the module with `run(task)`; limit_s: the time limit of its process, imports
    included."""

    module: str
    limit_s: float


SECTIONS: Mapping[str, Section] = {
    "ceilings": Section("tools.gpu_check.ceilings", 90),
    "build": Section("tools.gpu_check.build", 560),
    "kernels": Section("tools.gpu_check.kernels", 560),
    "models": Section("tools.gpu_check.models", 560),
    "speed": Section("tools.gpu_check.speed", 560),
    "prefill": Section("tools.gpu_check.prefill", 300),
    "ranks": Section("tools.gpu_check.ranks", 400),
    "experts": Section("tools.gpu_check.experts", 400),
    "deterministic": Section("tools.gpu_check.deterministic", 560),
}


def run_sections(
    names: Sequence[str],
    *,
    sections: Mapping[str, Section] = SECTIONS,
    dry: bool,
    paths: Sequence[Path] = (),
    total_s: float = TOTAL_S,
) -> dict[str, dict[str, Any]]:
    """The results by name: `state` ("passed" or the reason why not), `seconds`, `rows` and the end
    of the output.

    paths: added to PYTHONPATH.
    """
    ends, found = time.monotonic() + total_s, {}
    for name in names:
        limit_s = min(sections[name].limit_s, ends - time.monotonic())
        if limit_s < min(_LEAST_S, sections[name].limit_s):
            found[name] = _result("not started: no time left in this call", 0.0)
        else:
            found[name] = _run(sections[name].module, limit_s, dry=dry, paths=paths)
    return found


def _run(module: str, limit_s: float, *, dry: bool, paths: Sequence[Path]) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        rows, output = Path(place) / "rows.jsonl", Path(place) / "output"
        rows.touch()
        command = [sys.executable, "-m", "tools.gpu_check.child", module, place]
        with output.open("wb") as log:
            child = subprocess.Popen(
                command + ["--dry-run"] * dry, cwd=ROOT, env=_environment(dry, paths), stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            state = _wait(child, limit_s)
        lines = [json.loads(line) for line in rows.read_text().splitlines(keepends=True)
                 if line.endswith("\n")]  # fmt: skip
        tail = output.read_text(errors="replace")[-_OUTPUT_CHARACTERS:]
    failures = sum(not row.get("passed", True) for row in lines)
    if state == "passed" and failures:
        state = f"{failures} checks failed"
    return _result(state, time.monotonic() - began, lines, tail)


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> str:
    """Waits for the child, and ends its process group in any case, since it may have started other
    processes."""
    try:
        status = child.wait(limit_s)
        return "passed" if status == 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired:
        return f"exceeded its limit of {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _environment(dry: bool, paths: Sequence[Path]) -> dict[str, str]:
    added = [os.fspath(path) for path in (ROOT, *paths)]
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **({"OMP_NUM_THREADS": "1"} if dry else {}),
        "PYTHONPATH": os.pathsep.join([*added, before] if before else added),
        "TRITON_INTERPRET": "1" if dry else "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # required by torch's deterministic algorithms
        "HF_HUB_OFFLINE": "1",
    }


def _result(
    state: str, seconds: float, rows: Sequence[Mapping[str, Any]] = (), output: str = ""
) -> dict[str, Any]:
    return {"state": state, "seconds": round(seconds, 1), "rows": list(rows), "output": output}
