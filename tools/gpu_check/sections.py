"""Runs sections in processes, within a time limit: checks side by side, then measurements.

A process that ends in a check or is silent for too long costs that check: another one continues.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 570.0  # time limit of a call of the program
_CHECKS_SHARE = 0.6  # of that time for checks, if there are measurements too
_LEAST_S = 5.0  # a section is not started if less time is left
_KILLED_S = 10.0  # a process that is stuck in the driver survives longer
_OUTPUT_CHARACTERS = 3000
Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """module: the module with `run(task)`; limit_s: the time limit of its processes, imports
    included; silent_s: of the time without a line of results; processes: how many make its checks,
    beside those of other sections, because most of the time is compilation; 0 for measurements,
    beside which nothing runs."""

    module: str
    limit_s: float
    processes: int = 0
    silent_s: float = 120


SECTIONS: Mapping[str, Section] = {
    "ceilings": Section("tools.gpu_check.ceilings", 90),
    "build": Section("tools.gpu_check.build", 560, silent_s=300),
    "kernels": Section("tools.gpu_check.kernels", 560, processes=10),
    "models": Section("tools.gpu_check.models", 560, processes=5),
    "families": Section("tools.gpu_check.families", 560, processes=5),
    "vision": Section("tools.gpu_check.vision", 560, processes=3),
    "engine": Section("tools.gpu_check.engine", 560, processes=2),
    "speed": Section("tools.gpu_check.speed", 560, silent_s=300),
    "prefill": Section("tools.gpu_check.prefill", 300, silent_s=300),
    "peer": Section("tools.gpu_check.peer", 220, silent_s=220),
    "ranks": Section("tools.gpu_check.ranks", 400, silent_s=300),
    "experts": Section("tools.gpu_check.experts", 400, silent_s=300),
    "deterministic": Section("tools.gpu_check.deterministic", 560, processes=2),
    "variants": Section("tools.gpu_check.variants", 400, silent_s=400),
    "deterministic cost": Section("tools.gpu_check.deterministic_cost", 560, silent_s=300),
    "serving": Section("tools.gpu_check.serving", 200, silent_s=200),
}


@dataclass(frozen=True)
class Call:
    """What all sections share. results: the folder for rows and outputs of their processes, which
    are written at once; paths: added to PYTHONPATH; llama_cpp: the folder of llama.cpp's
    programs."""

    results: Path
    dry: bool
    paths: Sequence[Path] = ()
    llama_cpp: Path | None = None
    total_s: float = TOTAL_S


def run_sections(
    names: Sequence[str], call: Call, *, sections: Mapping[str, Section] = SECTIONS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and results, as sections end: `state` ("passed" or the reason why not), `seconds`,
    `rows` and the end of the output."""
    ends = time.monotonic() + call.total_s
    checks = [name for name in names if sections[name].processes]
    others = [name for name in names if not sections[name].processes]
    checks_end = ends - (1 - _CHECKS_SHARE) * call.total_s if others else ends
    with ThreadPoolExecutor(max(1, len(checks))) as threads:
        running = {
            threads.submit(_run_section, name, sections[name], call, checks_end): name
            for name in checks
        }
        for future in as_completed(running):
            yield running[future], future.result()
    for name in others:
        yield name, _run_section(name, sections[name], call, ends)


def _run_section(name: str, section: Section, call: Call, ends: float) -> dict[str, Any]:
    """`ends`: by the monotonic clock."""
    if ends - time.monotonic() < _LEAST_S:
        return _result("not started: no time left in this call", 0.0)
    ends = min(ends, time.monotonic() + section.limit_s)
    parts = 1 if call.dry else max(1, section.processes)
    with ThreadPoolExecutor(parts) as threads:
        running = [
            threads.submit(_run_part, name, section, call, part, ends) for part in range(parts)
        ]
        return _joined([each.result() for each in running])


def _run_part(name: str, section: Section, call: Call, part: int, ends: float) -> dict[str, Any]:
    """Runs a process, and others after it as long as each ends in another check."""
    began = time.monotonic()
    stem = f"{name.replace(' ', '-')}-{part}"
    rows, output = call.results / f"{stem}.jsonl", call.results / f"{stem}.txt"
    rows.touch()
    environment = _environment(call.paths, dry=call.dry, alone=not section.processes)
    options = ["--dry-run"] * call.dry
    if call.llama_cpp is not None:
        options += ["--llama-cpp", str(call.llama_cpp.resolve())]
    unfinished = True
    while unfinished:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as place, output.open("ab") as log:
            command = [sys.executable, "-m", "tools.gpu_check.child", section.module, place]
            child = subprocess.Popen(
                [*command, rows, call.results / f"{name.replace(' ', '-')}.taken", *options],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            state = _wait(child, rows, ends, section.silent_s)
        left = state != "passed" and time.monotonic() < ends
        unfinished = left and _fail_unfinished(rows, state)
    tail = output.read_text(errors="replace")[-_OUTPUT_CHARACTERS:]
    return _result(state, time.monotonic() - began, _whole_rows(rows), tail)


def _wait(child: subprocess.Popen[bytes], rows: Path, ends: float, silent_s: float) -> str:
    """Waits for the child, and ends its process group in any case, since it may have started other
    processes. It may be silent for longer until its first line, because of imports."""
    began, size, heard = time.monotonic(), rows.stat().st_size, None
    try:
        while True:
            now = time.monotonic()
            if rows.stat().st_size != size:
                size, heard = rows.stat().st_size, now
            if now > ends:
                return f"exceeded its limit of {now - began:.0f} s"
            if heard is not None and now - heard > silent_s:
                return f"gave no result for {silent_s:g} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(min(1.0, silent_s, max(0.0, ends - now)))
                return "passed" if status == 0 else f"ended with status {status}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILLED_S)


def _fail_unfinished(path: Path, state: str) -> bool:
    """Whether the process ended in a check, which has failed then, and has ended."""
    rows = _whole_rows(path)
    last = max((n for n, row in enumerate(rows) if row["kind"] == "begun"), default=None)
    if last is None or any(row["kind"] == "ended" for row in rows[last:]):
        return False
    added = [{**rows[last], "kind": "ended"}]
    if all(row.get("passed", True) for row in rows[last:]):
        failed = {"kind": "check", "passed": False, "error": f"the process {state}"}
        added.insert(0, rows[last] | failed)
    with path.open("a") as file:  # maybe after a line that is not whole
        file.write("".join(f"\n{json.dumps(row)}\n" for row in added))
    return True


def _whole_rows(path: Path) -> list[Row]:
    """Without lines that the process could not complete."""
    rows = list[Row]()
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a section from those of its processes; of outputs that of the first process
    that ended otherwise than it should."""
    rows = [
        row | {"process": number}
        for number, part in enumerate(parts) for row in part["rows"] if row["kind"] != "begun"
    ]  # fmt: skip
    worst = next((part for part in parts if part["state"] != "passed"), parts[0])
    failures, state = sum(not row.get("passed", True) for row in rows), worst["state"]
    if state == "passed" and failures:
        state = f"{failures} checks failed"
    elif state == "passed" and not rows:
        state = "gave no results"
    seconds = max(part["seconds"] for part in parts)
    return _result(state, seconds, rows, worst["output"])


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
