"""Ray's own HAProxy manager starts the command, which starts HAProxy again when it is killed."""

import asyncio
import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ray.serve._private import haproxy as ray_haproxy
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, ServerConfig

from serve_app.haproxy_supervisor import (
    MAX_FAILURES,
    STEADY_S,
    StartArguments,
    Supervisor,
    SupervisorFiles,
    planned,
)
from serve_app.temporary_folders import temporary_folder
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.proxy_configs import proxy_config

COMMAND = f'#!/bin/sh\nexec "{sys.executable}" -m serve_app.haproxy "$@"\n'
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def short_path():
    """A folder whose name leaves room for sockets, which have 108 characters."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def api(tmp_path, short_path, monkeypatch):
    """Ray's manager of HAProxy, with this command as its program."""
    command = tmp_path / "haproxy"
    command.write_text(COMMAND)
    command.chmod(0o700)
    monkeypatch.setattr(ray_haproxy, "RAY_SERVE_HAPROXY_BINARY_PATH", str(command))
    monkeypatch.setattr(ray_haproxy, "get_haproxy_binary", lambda: str(command))
    directory = short_path / "proxy"
    config = proxy_config(directory)
    return HAProxyApi(config, config_file_path=str(directory / "haproxy.cfg"))


@asynccontextmanager
async def started(api):
    await api.start()
    try:
        yield api._proc
    finally:
        await api.stop()


@asynccontextmanager
async def backend(api):
    """An application, and Ray's route to it."""

    async def answer(reader, writer):
        with suppress(ConnectionError), closing(writer):
            while line := await reader.readline():
                if not line.strip():  # the end of a request's head
                    writer.write(REPLY)
                    await writer.drain()

    async with served(api, answer):
        yield


@asynccontextmanager
async def served(api, answer):
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    servers = [ServerConfig(name="one", host="127.0.0.1", port=port)]
    route = BackendConfig("app", path_prefix="/", protocol=RequestProtocol.HTTP, servers=servers)
    api.set_backend_configs({"app": route})
    async with server:
        yield


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], stdout=subprocess.PIPE)
    return {int(each) for each in listed.stdout.split()}


async def asked(api):
    """The status line of a request, b"" if nothing listens or the connection breaks."""
    with suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", api.cfg.frontend_port)
        with closing(writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: local\r\nConnection: close\r\n\r\n")
            return (await reader.readline()).strip()
    return b""


async def is_answered(api):
    return await asked(api) == b"HTTP/1.1 200 OK"


async def test_a_killed_haproxy_is_started_again_and_ray_does_not_notice(api):
    async with backend(api), started(api) as supervisor:
        await until(lambda: is_answered(api))
        for _ in range(3):
            (killed,) = children(supervisor.pid)
            os.kill(killed, signal.SIGKILL)
            await until(lambda killed=killed: children(supervisor.pid) - {killed})
            await until(lambda: is_answered(api))
            assert await api._get_running_pid() == supervisor.pid
        await api.reload()
        assert api._proc.pid != supervisor.pid
        assert await is_answered(api)


async def test_an_open_answer_outlives_a_reload_and_then_its_haproxy_ends(api):
    arrived, answer = asyncio.Event(), asyncio.Event()

    async def wait(reader, writer):
        await reader.readline()
        arrived.set()
        await answer.wait()
        writer.write(REPLY)
        await writer.drain()
        writer.close()

    async with served(api, wait), started(api) as old:
        asking = asyncio.create_task(asked(api))
        await arrived.wait()
        await api.reload()
        assert old.returncode is None and api.has_alive_old_procs()
        answer.set()
        assert await asking == b"HTTP/1.1 200 OK"
        async with asyncio.timeout(HANG_S):
            assert await old.wait() == 0
        left = {path.name for path in Path(api.config_file_path).parent.iterdir()}
        assert not {f"haproxy.cfg.{old.pid}", f"admin.{old.pid}"} & left


async def test_its_folder_stays_although_the_server_that_made_it_was_killed(api, short_path):
    directory = Path(api.config_file_path).parent
    directory.mkdir(exist_ok=True)
    (directory / "caravan-in-use").touch()
    async with started(api):
        with temporary_folder(directory.name, within=short_path):
            assert (directory / "haproxy.cfg").exists()
    with temporary_folder(directory.name, within=short_path):
        assert not directory.exists()


async def test_without_its_supervisor_haproxy_ends(api):
    """Ray ends the process that it has started."""
    async with started(api) as supervisor:
        supervisor.kill()
        await until(lambda: not listens(api.cfg.frontend_port))


@pytest.mark.parametrize("first", ["the manager", "the node"])
async def test_without_its_node_haproxy_stops(api, monkeypatch, first):
    """Also if both have been killed, as when a server is."""
    with subprocess.Popen(["sleep", "infinity"]) as node:
        monkeypatch.setenv("RAY_RAYLET_PID", str(node.pid))
        manager = subprocess.Popen([sys.executable, "-c", START, *arguments_of(api)])
        manager.wait()
        if first == "the manager":
            await until(lambda: listens(api.cfg.frontend_port))
        node.kill()
    await until(lambda: api.count_haproxy_processes() == 0)
    assert not listens(api.cfg.frontend_port)


def listens(port):
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_new_manager_takes_over_from_one_that_was_killed(api):
    """Until it has routes, requests are answered by the HAProxy of the killed one."""
    next_manager = HAProxyApi(api.cfg, config_file_path=api.config_file_path)
    async with backend(api):
        orphan = subprocess.Popen([sys.executable, "-c", START, *arguments_of(api)])
        orphan.wait()  # its HAProxy keeps running
        await until(lambda: is_answered(api))
        async with started(next_manager):
            assert await is_answered(next_manager)
            next_manager.set_backend_configs(api.backend_configs)
            await next_manager.reload()
            assert await is_answered(next_manager)
            await until(lambda: next_manager.count_haproxy_processes() == 1)
            assert await is_answered(next_manager)


# A manager that ends at once without stopping its HAProxy.
START = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"


def arguments_of(api):
    api._generate_config_file_internal()
    return [ray_haproxy.get_haproxy_binary(), "-db", "-f", api.config_file_path, "-dR"]


async def test_only_this_user_may_use_the_admin_socket(api):
    async with started(api):
        for path in Path(api.cfg.socket_path).parent.glob("admin.*"):
            if path.is_socket():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_configuration_that_haproxy_refuses_ends_the_command_with_its_status(api):
    api._generate_config_file_internal()
    path = Path(api.config_file_path)
    path.write_text(path.read_text().replace("nbthread", "nbthreads"))
    done = subprocess.run(
        [ray_haproxy.get_haproxy_binary(), "-db", "-f", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "unknown keyword 'nbthreads'" in done.stderr


# A program that crashes; each start is a line of a file.
CRASHING = '#!/bin/sh\necho >> "$0.starts"\nkill -KILL $$\n'


@pytest.mark.parametrize("steady", [0, MAX_FAILURES + 1])
async def test_a_program_that_crashes_at_once_is_given_up_but_not_one_that_ran(tmp_path, steady):
    """`steady`: starts that run well before they crash."""
    program = tmp_path / "crashing"
    program.write_text(CRASHING)
    program.chmod(0o700)
    now, pauses = [0.0, *itertools.accumulate([2 * STEADY_S] * 2 * steady)], []
    clock = itertools.chain(now, itertools.repeat(now[-1])).__next__

    async def sleep(seconds):
        pauses.append(seconds)

    files = SupervisorFiles(tmp_path / "config", tmp_path / "admin", os.getpid())
    supervisor = Supervisor(
        str(program), StartArguments("", [], []), files, clock=clock, sleep=sleep
    )
    assert await supervisor.run() == 1
    starts = len((tmp_path / "crashing.starts").read_text())
    assert steady + MAX_FAILURES <= starts <= steady + MAX_FAILURES + 1
    assert pauses == [0.05 * 2**each for each in range(MAX_FAILURES - 1)]


# A program that ends on SIGTERM and adds a line to a file on each SIGUSR1.
DRAINING = """#!/bin/sh
trap 'echo >> "$0.stops"' USR1
trap 'exit 0' TERM
touch "$0.stops"
while :; do sleep 0.01; done
"""


async def test_a_soft_stop_is_passed_on_once(tmp_path):
    """Ray repeats it, perhaps while HAProxy is ending, which that would kill."""
    program, stops = tmp_path / "draining", tmp_path / "draining.stops"
    program.write_text(DRAINING)
    program.chmod(0o700)
    files = SupervisorFiles(tmp_path / "config", tmp_path / "admin", os.getpid())
    running = asyncio.create_task(Supervisor(str(program), StartArguments("", [], []), files).run())
    await until(stops.exists)
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(stops.read_text)
    os.kill(os.getpid(), signal.SIGUSR1)
    await settled()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert len(stops.read_text()) == 1


async def test_a_stop_during_a_start_reaches_the_new_process(tmp_path, monkeypatch):
    program = tmp_path / "waiting"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    files = SupervisorFiles(tmp_path / "config", tmp_path / "admin", os.getpid())
    supervisor = Supervisor(str(program), StartArguments("", [], []), files)
    create = asyncio.create_subprocess_exec

    async def interrupted(*arguments, **options):
        process = await create(*arguments, **options)
        supervisor._forward_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", interrupted)
    async with asyncio.timeout(HANG_S):
        assert await supervisor.run() == 128 + signal.SIGTERM


CONFIG = """global
    stats socket /d/admin.sock mode 600 level admin
frontend http_frontend
    bind 127.0.0.1:8000
    use_backend app if is_app
"""
FILES = SupervisorFiles(Path("/d/haproxy.cfg"), Path("/d/admin.sock"), 9)


def test_rays_arguments_name_supervisors_and_haproxy_gets_their_sockets(tmp_path):
    files = SupervisorFiles(tmp_path / "haproxy.cfg", tmp_path / "admin.sock", 9)
    files.of(7).own_admin.touch()
    given = ["-db", "-f", str(files.config), "-dR", "-sf", "7", "5", "-x", str(files.admin)]
    start = planned(CONFIG, given, files, [])
    assert start.again == ["-db", "-f", f"{files.config}.9", "-dR"]
    assert start.first == [*start.again, "-sf", "7", "5", "-x", str(files.of(7).own_admin)]


def test_an_orphan_keeps_the_port_until_there_are_routes():
    with_routes = planned(CONFIG, ["-db", "-f", "/d/haproxy.cfg"], FILES, [7])
    assert with_routes.first[-2:] == ["-sf", "7"]
    assert "bind 127.0.0.1:8000" in with_routes.config
    routeless = CONFIG.replace("    use_backend app if is_app\n", "")
    without = planned(routeless, ["-db", "-f", "/d/haproxy.cfg"], FILES, [7])
    assert "-sf" not in without.first
    assert "bind unix@/d/http.9 mode 600" in without.config
