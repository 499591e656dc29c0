"""Measures the time from process start to the first token, and its parts from the server's log."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.contender import in_turns
from bench.report import Row
from bench.server import Server

NAME = "measured"
LOG_TIMEOUT_S = 30
# The parts of a start in order, each named by what happens in it. Without Ray, most are missing.
RAY = "interpreter and Ray's processes"
SERVE = "Serve's controller and proxy"
BUILDER = "a process that builds the application, and its imports"
CHECKED = "settings and model files checked"
PROCESS = "a process for the replica"
IMPORTS = "imports of the replica"
LOADED = "model file mapped, tokenizer and template made"
WARM = "memory reserved, first step computed"
REACHED = "until the replica is reached by HTTP"
TOKEN = "first token of the first request"
ALL = "**process start to first token**"
# The log lines of Ray that end a part, by their first words after the local time.
_OF_RAY = {RAY: "Started a local Ray instance", SERVE: "Submitted deploy config"}
_STAMP = r"(?m)^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\s.*"


def start_rows(label: str, path: Path, threads: int, rounds: int) -> list[Row]:
    """A row for each part, with Ray and with plain uvicorn, which lacks some parts."""
    print(f"{label}: process start to first token", flush=True)
    model = {"name": NAME, "source": str(path), "device": "cpu", "threads": threads}
    through_ray = partial(Server.of_ray, {"models": [model]})
    plain_uvicorn = partial(Server.of_uvicorn, {"models": [model]})
    ray, plain = in_turns(_parts_of, through_ray, plain_uvicorn, rounds)
    return [Row(label, part, "s", _values(ray, part), _values(plain, part)) for part in ray[0]]


def moments(log: str) -> dict[str, float]:
    """The end of each part in seconds since the epoch, for the parts that `log` has so far."""
    found = {part: at for part, words in _OF_RAY.items() if (at := _time_in_ray_log(log, words))}
    events = {event["event"]: event for event in _events(log)}
    configured, ready = events.get("configured"), events.get("ready")
    if configured is not None:
        found[BUILDER] = _at(configured) - configured["check_s"]
        found[CHECKED] = _at(configured)
    for part, name in ((PROCESS, "starting"), (IMPORTS, "device")):
        if name in events:
            found[part] = _at(events[name])
    if ready is not None:
        found[LOADED] = _at(ready) - ready["warm_up_s"]
        found[WARM] = _at(ready)
    return found


def parts(begun_at: float, moments: Mapping[str, float]) -> dict[str, float]:
    """The seconds between consecutive moments, and finally the total."""
    ends = list(moments.values())
    passed = [end - begin for begin, end in zip([begun_at, *ends], ends, strict=False)]
    return {**dict(zip(moments, passed, strict=True)), ALL: ends[-1] - begun_at}


def _parts_of(start: Callable[[], Server]) -> dict[str, float]:
    with closing(start()) as server:
        _ask_for_a_token(server.url)
        seen = {REACHED: server.answered_at, TOKEN: time.time()}
        return parts(server.begun_at, {**_logged_moments(server), **seen})


def _ask_for_a_token(url: str) -> None:
    body = {"model": NAME, "prompt": "The day after", "max_tokens": 1, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as reply:
        reply.raise_for_status()
        next(line for line in reply.iter_lines() if line)


def _logged_moments(server: Server) -> dict[str, float]:
    """The moments in the server's log. Waits for them, because a replica's lines reach the log
    late."""
    deadline = time.monotonic() + LOG_TIMEOUT_S
    while WARM not in (found := moments(server.log())):
        if time.monotonic() > deadline:
            raise SystemExit(f"The server's log has no start lines:\n{server.log()[-4000:]}")
        time.sleep(0.1)
    return found


def _events(log: str) -> Iterator[dict[str, Any]]:
    """The events that this project has logged, without Ray's prefix of the lines."""
    for line in log.splitlines():
        _, brace, rest = line.partition('{"event": ')
        if brace:
            try:
                yield json.loads(brace + rest)
            except json.JSONDecodeError:
                continue  # the line is not complete yet


def _at(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _time_in_ray_log(log: str, words: str) -> float | None:
    line = re.search(_STAMP + re.escape(words), log)
    return None if line is None else datetime.fromisoformat(line[1].replace(",", ".")).timestamp()


def _values(rounds: Sequence[Mapping[str, float]], part: str) -> tuple[float, ...]:
    return tuple(round[part] for round in rounds if part in round)
