"""The parts of a server's start are read from its log, which also has lines of Ray."""

import json
from datetime import datetime

import pytest

from bench.report import Row, parts_table
from bench.start import (
    ALL,
    BUILDER,
    CHECKED,
    IMPORTS,
    LOADED,
    PROCESS,
    RAY,
    SERVE,
    WARM,
    moments,
    parts,
)

MINUTE = datetime.fromisoformat("2026-11-21T18:37:00+00:00").timestamp()
COLOURED = "\x1b[36m(ServeReplica:caravan:demo pid=32168)\x1b[0m "


def event(name: str, second: float, **facts: object) -> str:
    """A line of this project, at this number of seconds after the full minute."""
    stamp = f"2026-11-21T18:37:{second:09.6f}Z"
    return json.dumps({"event": name, **facts, "level": "info", "timestamp": stamp})


EVENTS = {
    "configured": event("configured", 4.5, models=["demo"], check_s=0.5),
    "starting": event("starting", 8.0, model="demo"),
    "device": event("device", 11.0, kind="cpu", cpus=2, threads=2),
    "loading": event("loading", 11.2, model="demo", percent=2),
    "ready": event("ready", 12.0, model="demo", load_s=0.7, warm_up_s=0.25),
}


def local(second: float) -> str:
    """A time stamp of Ray: local time without a zone."""
    at = datetime.fromtimestamp(MINUTE + second)
    return f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03}"


def log_of_ray() -> str:
    return "\n".join(
        [
            f"{local(-12)}\tINFO scripts.py:489 -- Running config file: 'serve.yaml'.",
            f"{local(-4.5)}\tINFO worker.py:2029 -- Started a local Ray instance. View the "
            "dashboard at \x1b[1m\x1b[32mhttp://127.0.0.1:8265 \x1b[39m\x1b[22m",
            f'INFO {local(0.4)} serve 31285 -- Started Serve in namespace "serve".',
            f"{local(0.5)}\tSUCC scripts.py:546 -- \x1b[32mSubmitted deploy config successfully.",
            "\x1b[36m(build_serve_application pid=32031)\x1b[0m " + EVENTS["configured"],
            *(COLOURED + EVENTS[name] for name in ("starting", "device", "loading", "ready")),
        ]
    )


def test_each_part_ends_at_its_log_line_where_the_next_one_starts():
    found = parts(MINUTE - 13, moments(log_of_ray()))
    assert found == {
        RAY: pytest.approx(8.5, abs=1e-3),
        SERVE: pytest.approx(5.0, abs=1e-3),
        BUILDER: pytest.approx(3.5, abs=1e-3),
        CHECKED: pytest.approx(0.5, abs=1e-3),
        PROCESS: pytest.approx(3.5, abs=1e-3),
        IMPORTS: pytest.approx(3.0, abs=1e-3),
        LOADED: pytest.approx(0.75, abs=1e-3),
        WARM: pytest.approx(0.25, abs=1e-3),
        ALL: pytest.approx(25.0, abs=1e-3),
    }
    assert list(found)[-1] == ALL


def test_without_ray_fewer_parts_add_up_to_the_whole():
    log = "\n".join(EVENTS[name] for name in ("device", "loading", "ready"))
    found = parts(MINUTE + 8, moments(log))
    assert list(found) == [IMPORTS, LOADED, WARM, ALL]
    assert found[IMPORTS] == pytest.approx(3.0)
    assert sum(found.values()) == pytest.approx(2 * found[ALL])


def test_an_incomplete_line_is_ignored():
    assert WARM not in moments(log_of_ray()[:-5])


def test_a_part_that_one_contender_lacks_is_a_dash_in_the_table():
    rows = [Row("demo", RAY, "s", (7.0, 8.0, 9.5), ()), Row("demo", WARM, "s", (0.25,), (0.5,))]
    lines = parts_table(rows, "Ray", "plain").splitlines()
    assert lines[2:] == [f"| demo | {RAY} | s | 8.00 | – |", f"| demo | {WARM} | s | 0.25 | 0.50 |"]
