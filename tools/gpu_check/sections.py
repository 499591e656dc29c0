"""Runs sections in processes, within a time limit: checks side by side, then measurements."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 570.0  # time limit of a call of the program
_LEAST_S = 5.0  # a section is not started if less time is left
_OUTPUT_CHARACTERS = 3000


@dataclass(frozen=True)
class Section:
    """module: the module with `run(task)`; limit_s: the time limit of its processes, imports
    included; processes: how many divide its checks, beside those of other sections, because most of
    the time is compilation; 0 for measurements, beside which nothing runs."""

    module: str
    limit_s: float
    processes: int = 0


SECTIONS: Mapping[str, Section] = {
    "ceilings": Section("tools.gpu_check.ceilings", 90),
    "build": Section("tools.gpu_check.build", 560),
    "kernels": Section("tools.gpu_check.kernels", 560, processes=14),
    "models": Section("tools.gpu_check.models", 560, processes=6),
    "speed": Section("tools.gpu_check.speed", 560),
    "prefill": Section("tools.gpu_check.prefill", 300),
    "peer": Section("tools.gpu_check.peer", 220),
    "ranks": Section("tools.gpu_check.ranks", 400),
    "experts": Section("tools.gpu_check.experts", 400),
    "deterministic": Section("tools.gpu_check.deterministic", 560, processes=2),
    "variants": Section("tools.gpu_check.variants", 400),
    "deterministic cost": Section("tools.gpu_check.deterministic_cost", 560),
    "serving": Section("tools.gpu_check.serving", 200),
}


def run_sections(
    names: Sequence[str],
    *,
    sections: Mapping[str, Section] = SECTIONS,
    dry: bool,
    paths: Sequence[Path] = (),
    llama_cpp: Path | None = None,
    total_s: float = TOTAL_S,
) -> dict[str, dict[str, Any]]:
    """The results by name: `state` ("passed" or the reason why not), `seconds`, `rows` and the end
    of the output.

    paths: added to PYTHONPATH. llama_cpp: the folder of llama.cpp's programs.
    """
    ends = time.monotonic() + total_s
    options = ["--dry-run"] * dry
    if llama_cpp is not None:
        options += ["--llama-cpp", str(llama_cpp.resolve())]

    def run(name: str) -> dict[str, Any]:
        section = sections[name]
        limit_s = min(section.limit_s, ends - time.monotonic())
        if limit_s < min(_LEAST_S, section.limit_s):
            return _result("not started: no time left in this call", 0.0)
        parts = 1 if dry else max(1, section.processes)
        environment = _environment(paths, dry=dry, alone=not section.processes)
        with ThreadPoolExecutor(parts) as threads:
            running = [
                threads.submit(
                    _run, section, [str(part), str(parts), *options], limit_s, environment
                )
                for part in range(parts)
            ]
            return _joined([each.result() for each in running])

    checks = [name for name in names if sections[name].processes]
    with ThreadPoolExecutor(max(1, len(checks))) as threads:
        found = dict(zip(checks, threads.map(run, checks), strict=True))
    return {name: found[name] if name in found else run(name) for name in names}


def _run(
    section: Section, arguments: Sequence[str], limit_s: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        rows, output = Path(place) / "rows.jsonl", Path(place) / "output"
        rows.touch()
        module = [sys.executable, "-m", "tools.gpu_check.child", section.module]
        with output.open("wb") as log:
            child = subprocess.Popen(
                [*module, place, *arguments], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
            state = _wait(child, limit_s)
        lines = [json.loads(line) for line in rows.read_text().splitlines(keepends=True)
                 if line.endswith("\n")]  # fmt: skip
        tail = output.read_text(errors="replace")[-_OUTPUT_CHARACTERS:]
    return _result(state, time.monotonic() - began, lines, tail)


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a section from those of its processes; of outputs that of the first process
    that ended otherwise than it should."""
    rows = [row for part in parts for row in part["rows"]]
    worst = next((part for part in parts if part["state"] != "passed"), parts[0])
    failures, state = sum(not row.get("passed", True) for row in rows), worst["state"]
    if state == "passed" and failures:
        state = f"{failures} checks failed"
    seconds = max(part["seconds"] for part in parts)
    return _result(state, seconds, rows, worst["output"])


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


def _environment(paths: Sequence[Path], *, dry: bool, alone: bool) -> dict[str, str]:
    added = [os.fspath(path) for path in (ROOT, *paths)]
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **({"OMP_NUM_THREADS": "1"} if dry or not alone else {}),
        "PYTHONPATH": os.pathsep.join([*added, before] if before else added),
        "TRITON_INTERPRET": "1" if dry else "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # required by torch's deterministic algorithms
        "HF_HUB_OFFLINE": "1",
    }


def _result(
    state: str, seconds: float, rows: Sequence[Mapping[str, Any]] = (), output: str = ""
) -> dict[str, Any]:
    return {"state": state, "seconds": round(seconds, 1), "rows": list(rows), "output": output}
