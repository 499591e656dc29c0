"""The environment of Serve's processes that `caravan serve` starts."""

import socket
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from serve_app.cli.serve import environment


def made(own: Mapping[str, str], port: int = 8000) -> dict[str, str]:
    return environment(own, port, Path("/f"))


def test_the_users_own_environment_wins():
    variables = made({"GOMP_SPINCOUNT": "7", "HOME": "/home/x"})
    assert (variables["GOMP_SPINCOUNT"], variables["HOME"]) == ("7", "/home/x")
    secrets = {made({})["CARAVAN_PROXY_SECRET"] for _ in range(2)}
    assert len(secrets) == 2


def test_haproxys_command_may_be_elsewhere_than_python(tmp_path, monkeypatch):
    """As in installations for one user."""
    for folder in ("bin", "python", "linked"):
        (tmp_path / folder).mkdir()
    for command in ("caravan", "caravan-haproxy"):
        (tmp_path / "bin" / command).touch()
    (tmp_path / "linked" / "caravan").symlink_to(tmp_path / "bin" / "caravan")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python3"))
    name, expected = "RAY_SERVE_HAPROXY_BINARY_PATH", tmp_path / "bin" / "caravan-haproxy"
    for script in ("bin", "linked"):
        monkeypatch.setattr(sys, "argv", [str(tmp_path / script / "caravan")])
        assert made({})[name] == str(expected)
    monkeypatch.setattr(sys, "argv", ["serve_app/cli/__main__.py"])
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path / "bin"))
    assert made({})[name] == str(expected)


@pytest.mark.parametrize("stated", [{}, {"no_proxy": "inner"}, {"NO_PROXY": "inner"}])
def test_rays_processes_reach_each_other_where_a_proxy_is_set(stated):
    """Its agent gets metrics from the processes of the node."""
    variables = made({"HTTPS_PROXY": "http://proxy:3128", **stated})
    assert variables["no_proxy"] == variables["NO_PROXY"]
    hosts = variables["no_proxy"].split(",")
    assert hosts[: len(stated)] == [*stated.values()] and {"localhost", "127.0.0.1"} <= {*hosts}
    with socket.create_server((hosts[-1], 0)):  # an address of this machine
        pass
    assert made(stated).get("no_proxy") == stated.get("no_proxy")


def test_a_second_server_gets_ports_of_its_own():
    name = "RAY_SERVE_HAPROXY_STATS_PORT"
    with socket.socket() as taken, suppress(OSError):  # else another server has it
        taken.bind(("127.0.0.1", 8404))
        taken.listen()
        assert made({})[name] != "8404"
    assert made({name: "8404"})[name] == "8404"


INNER = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)


def test_servers_that_start_at_once_choose_different_ports():
    """Ray opens the ports many seconds after they are chosen."""
    servers = (8000, 8001, 8080, 18480, 18490, 20001, 21333, 65535)
    chosen = [int(made({}, port)[name]) for port in servers for name in INNER]
    assert len({*chosen, *servers}) == len(servers) * 4
    assert max(chosen) < 30_000, "the kernel and Ray's ingresses choose others"
