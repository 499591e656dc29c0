"""Runs HAProxy as a child and starts it again when it is killed or crashes.

Ray replaces a lost HAProxy by replacing the actor that started it, which takes ten seconds or more
on a busy host; nothing listens meanwhile. Here HAProxy listens again after some ten milliseconds.

Ray identifies HAProxy processes by the id of the process that it has started, which is this one,
and by the id that the admin socket reports. So this process answers on the admin socket that Ray
knows and puts its own id into the replies, and it forwards the signals by which Ray's next HAProxy
replaces it. HAProxy reads a copy of the configuration, because Ray writes the next one to the same
path. When Ray's node has ended, perhaps killed, HAProxy stops listening.
"""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serve_app.child_process import end_with_parent

# Signals for a soft stop, for a stop, and to a process whose successor cannot bind its ports yet.
_STOPS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_PASSED_ON = (*_STOPS, signal.SIGTTOU, signal.SIGTTIN)
# In which Ray tells its workers the process of their node.
_NODE_VARIABLE = "RAY_RAYLET_PID"
_READY_POLL_S = 0.02
_COMMAND_TIMEOUT_S = 30.0
# HAProxy is restarted at once, after further failures with growing pauses, and after this many
# failures in a row not at all. A process that ran for `STEADY_S` does not count as a failure.
_FIRST_PAUSE_S = 0.05
STEADY_S = 2.0
MAX_FAILURES = 8
_SOCKET = re.compile(r"^( *stats socket )(\S+) ", re.MULTILINE)
_BIND = re.compile(r"^(frontend http_frontend\n +bind )\S+$", re.MULTILINE)
_ROUTE = re.compile(r"^ *use_backend ", re.MULTILINE)
_PID = re.compile(rb"^Pid: \d+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SupervisorFiles:
    """The files of one supervisor. `config`, `admin`: Ray's paths of the configuration and of the
    admin socket; the others are HAProxy's own, named after the supervisor's process id. The names
    of sockets are short, because Unix limits their paths and Ray's have the id of a node."""

    config: Path
    admin: Path
    pid: int

    @property
    def own_config(self) -> Path:
        return self.config.with_name(f"{self.config.name}.{self.pid}")

    @property
    def own_admin(self) -> Path:
        return self.admin.with_name(f"admin.{self.pid}")

    @property
    def unused(self) -> Path:
        """The socket that HAProxy listens on instead of the port while another process has the
        port."""
        return self.admin.with_name(f"http.{self.pid}")

    def of(self, pid: int) -> "SupervisorFiles":
        return SupervisorFiles(self.config, self.admin, pid)

    def remove(self) -> None:
        for path in (self.own_config, self.own_admin, self.unused):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class StartArguments:
    """Arguments of HAProxy. `first`: of the first start, which takes over from the earlier
    supervisors `replaced`; `again`: of a start after a crash."""

    config: str
    first: list[str]
    again: list[str]


def planned(
    config: str, arguments: Sequence[str], files: SupervisorFiles, orphans: Sequence[int]
) -> StartArguments:
    """`arguments`: the arguments that Ray passes. `orphans`: supervisors whose actor was killed.

    A new actor first starts HAProxy without routes. An orphan keeps the port and serves until Ray
    starts HAProxy with a configuration that has routes.
    """
    config = _SOCKET.sub(rf"\g<1>{files.own_admin} ", config)
    again = [str(files.own_config) if each == str(files.config) else each for each in arguments]
    replaced = [int(value) for value in _pop_option(again, "-sf")]
    _pop_option(again, "-x")  # Ray's admin socket, from which no listening sockets can be had
    listening = [files.of(pid).own_admin for pid in (*orphans, *replaced)]
    if _ROUTE.search(config):
        replaced = [*orphans, *replaced]
    elif orphans:
        config = _BIND.sub(rf"\g<1>unix@{files.unused} mode 600", config)
    first = again.copy()
    if replaced:
        first += ["-sf", *map(str, replaced)]
    first += next((["-x", str(path)] for path in listening if path.exists()), [])
    return StartArguments(config, first, again)


def orphans_of(files: SupervisorFiles) -> list[int]:
    """Supervisors of the same configuration that another process has started; removes the files of
    those that have ended."""
    found = []
    others = files.config.parent.glob(f"{files.config.name}.*")
    for pid in [int(path.suffix[1:]) for path in others if path.suffix[1:].isdigit()]:
        parent = _parent_of(pid, files.config)
        if parent is None:
            files.of(pid).remove()
        elif pid != files.pid and parent != os.getppid():
            found.append(pid)
    return found


def supervise(binary: str, arguments: Sequence[str], config: Path) -> int:
    """Runs HAProxy until a signal ends it or it cannot be started; its exit status."""
    text = config.read_text(encoding="utf-8")
    (socket_path,) = {found[1] for found in _SOCKET.findall(text)}
    files = SupervisorFiles(config, Path(socket_path), os.getpid())
    start = planned(text, arguments, files, orphans_of(files))
    files.own_config.touch(mode=0o600)
    files.own_config.write_text(start.config, encoding="utf-8")
    node = os.environ.get(_NODE_VARIABLE)
    try:
        supervisor = Supervisor(binary, start, files, node=int(node) if node else None)
        return asyncio.run(supervisor.run())
    finally:
        files.remove()


class Supervisor:
    """`node`: the process with whose end HAProxy stops; `clock`, `sleep`: in seconds."""

    def __init__(
        self,
        binary: str,
        start: StartArguments,
        files: SupervisorFiles,
        *,
        node: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._binary = binary
        self._start = start
        self._files = files
        self._node = node
        self._clock = clock
        self._sleep = sleep
        self._process: Process | None = None
        self._stopping = self._draining = False
        self._missed: int | None = None  # a stop that arrived while no process was running
        self._failures = 0  # consecutive failures

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _PASSED_ON:
            loop.add_signal_handler(number, self._forward_signal, number)
        process = await self._started(self._start.first)
        tasks = [asyncio.create_task(self._answer_admin())]
        if self._node is not None:
            tasks.append(asyncio.create_task(self._stop_with(self._node)))
        try:
            return await self._keep_running(process)
        finally:
            for task in tasks:
                task.cancel()

    async def _keep_running(self, process: Process) -> int:
        while True:
            started = self._clock()
            status = await process.wait()
            if self._stopping or (status >= 0 and not self._failures):
                return status if status >= 0 else 128 - status
            self._failures = 1 if self._clock() - started > STEADY_S else self._failures + 1
            _report(f"HAProxy has ended with status {status}")
            if self._failures > MAX_FAILURES:
                return 1
            if self._failures > 1:
                await self._sleep(_FIRST_PAUSE_S * 2 ** (self._failures - 2))
            if self._stopping:
                return 0
            process = await self._started(self._start.again)

    async def _started(self, arguments: Sequence[str]) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            self._binary, *arguments, preexec_fn=end_with_parent
        )
        if self._missed is not None:
            self._process.send_signal(self._missed)
        return self._process

    def _forward_signal(self, number: int) -> None:
        """Forwards a soft stop once only: Ray repeats it, which would kill a HAProxy that is just
        ending."""
        self._stopping |= number in _STOPS
        if self._process is None or self._process.returncode is not None:
            self._missed = number if number in _STOPS else self._missed
            return
        if number == signal.SIGUSR1 and self._draining:
            return
        self._draining |= number == signal.SIGUSR1
        self._process.send_signal(number)

    async def _stop_with(self, node: int) -> None:
        """A soft stop, because answers of other nodes may still be running."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with suppress(ProcessLookupError):  # it has ended already
            process = os.pidfd_open(node)
            loop.add_reader(process, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(process)
                os.close(process)
        _report("Ray's node has ended")
        self._forward_signal(signal.SIGUSR1)

    async def _answer_admin(self) -> None:
        """Takes over Ray's path of the admin socket once HAProxy has bound its ports."""
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_unix_connection(self._files.own_admin)
                writer.close()
                break
            await asyncio.sleep(_READY_POLL_S)
        server = await asyncio.start_unix_server(self._forward, sock=_listening(self._files.admin))
        async with server:
            await server.serve_forever()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one command. HAProxy closes the connection after the reply."""
        try:
            with suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                    reply = await self._send_command(await reader.readline())
                    writer.write(_PID.sub(b"Pid: %d" % self._files.pid, reply))
                    await writer.drain()
        finally:
            writer.close()

    async def _send_command(self, command: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._files.own_admin)
        try:
            writer.write(command)
            return await reader.read()
        finally:
            writer.close()


def _listening(path: Path) -> socket.socket:
    """A socket that replaces the one at `path` in one step; only this user may connect."""
    bound = path.with_name(f"{path.name}.{os.getpid()}.new")
    bound.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listening.bind(str(bound))
    finally:
        os.umask(mask)
    listening.listen()
    os.replace(bound, path)
    return listening


def _parent_of(pid: int, config: Path) -> int | None:
    """The parent of a supervisor of this configuration; None if the process is not one."""
    process = Path("/proc") / str(pid)
    try:
        if str(config).encode() not in (process / "cmdline").read_bytes().split(b"\0"):
            return None
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _pop_option(arguments: list[str], option: str) -> list[str]:
    """Removes an option from the arguments and returns its values."""
    if option not in arguments:
        return []
    begin = arguments.index(option)
    end = begin + 1
    while end < len(arguments) and not arguments[end].startswith("-"):
        end += 1
    values = arguments[begin + 1 : end]
    del arguments[begin:end]
    return values


def _report(text: str) -> None:
    print(f"caravan-haproxy: {text}", file=sys.stderr, flush=True)
