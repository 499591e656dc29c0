"""Servers that are compared start anew in each round, and none runs beside another one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import server, start, streams
from bench.server import Server
from bench.streams import STREAMS, Load


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The starts and ends of servers, which are fakes."""
    seen: list[str] = []

    class Fake:
        def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
            assert arguments["models"][0]["name"] == "measured"
            self.url = name
            seen.append(f"{name} starts")

        def close(self) -> None:
            seen.append(f"{self.url} ends")

    monkeypatch.setattr(Server, "of_ray", lambda arguments: Fake("ray", arguments))
    monkeypatch.setattr(Server, "of_uvicorn", lambda arguments: Fake("uvicorn", arguments))
    return seen


IN_TURN = [
    *("ray starts", "ray ends", "uvicorn starts", "uvicorn ends"),
    *("uvicorn starts", "uvicorn ends", "ray starts", "ray ends"),
]


def test_no_ray_runs_beside_plain_uvicorn(events, monkeypatch) -> None:
    prompts: dict[str, list[object]] = {"ray": [], "uvicorn": []}

    async def load(url: str, asked: Sequence[Sequence[int]], tokens: int) -> Load:
        prompts[url].append(asked)
        return Load(len(asked), tokens)

    monkeypatch.setattr(streams, "_load", load)
    rows = streams.stream_rows(threads=1, rounds=2)
    assert events == IN_TURN
    assert prompts["ray"] == prompts["uvicorn"]
    assert [row.first for row in rows[::2]] == [(count, count) for count in STREAMS]
    assert {row.second for row in rows[1::2]} == {(64, 64)}, "of the measured loads"


def test_servers_take_turns_at_starting_first(events, monkeypatch) -> None:
    def measured(begin: Callable[[], Server]) -> dict[str, float]:
        begin().close()
        return {start.ALL: 1.0}

    monkeypatch.setattr(start, "_parts_of", measured)
    [row] = start.start_rows("demo", Path("demo.gguf"), threads=1, rounds=2)
    assert (row.task, row.first, row.second) == (start.ALL, (1.0, 1.0), (1.0, 1.0))
    assert events == IN_TURN


def test_what_is_measured_through_ray_is_caravan_serve(monkeypatch) -> None:
    """It sets what `serve run` does not: the priority of replicas, HAProxy, spins of threads."""
    made: list[Any] = []

    def keep(
        self: Server, command: list[str], port: int, folder: Any, *_: Any, **more: Any
    ) -> None:
        config = yaml.safe_load(Path(command[-2]).read_text())
        made.append((command, port, config, more))
        folder.cleanup()

    monkeypatch.setattr(server.Server, "__init__", keep)
    arguments = {"models": [{"name": "measured", "source": "x.gguf"}]}
    Server.of_ray(arguments, key="k", variables={"CARAVAN_MODELS": "/store"})
    [(command, port, config, more)] = made
    assert command[1:4] == ["-m", "serve_app.cli", "serve"]
    assert config["http_options"] == {"host": "127.0.0.1", "port": port}
    assert config["applications"][0]["args"] == arguments
    assert (more["key"], more["variables"]["CARAVAN_MODELS"]) == ("k", "/store")


def test_a_servers_port_is_none_that_the_kernel_gives_to_other_processes() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {server.free_port() for _ in range(5)}
    assert not any(first <= port <= last for port in ports)


def test_plain_uvicorn_has_the_threads_of_caravan_serve(monkeypatch) -> None:
    made: list[Any] = []
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(server.Server, "__init__", lambda *_, variables: made.append(variables))
    Server.of_uvicorn({"models": [{"name": "measured"}]})
    assert made == [{"GOMP_SPINCOUNT": "1000"}]
