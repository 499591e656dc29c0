"""A server for checks: `serve run` on a Ray cluster of its own, and what it has started."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.chaos.cluster import descendants
from serve_app.child_process import begin_server
from serve_app.cli.log_lines import LogLine, parse_line
from serve_app.cli.serve import environment
from serve_app.haproxy import BINARY_VARIABLE, COMMAND
from tests.checkout import ROOT
from tests.loopback import free_port
from tests.serve.application import short_folder

APPLICATION = "caravan"
REQUEST_S = 60.0  # time limit of an answer
_CONFIG = ROOT / "configs" / "one_gpu.yaml"
_STOP_S = 30.0
_POLL_S = 0.1
_FAILED = f"Deploying app '{APPLICATION}' failed"
_SHOWN_LINES = 40
_LINE = 300


class ServerEndedError(Exception):
    """The server has ended, or serves nothing."""


@dataclass(frozen=True, slots=True)
class Server:
    """`folder`: for files of Ray and HAProxy, and the log."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def json(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        """RuntimeError with the server's words if it refuses."""
        reply = httpx.request(method, self.url + path, json=body or None, timeout=REQUEST_S)
        if not reply.is_success:
            raise RuntimeError(f"{path}: status {reply.status_code}: {reply.text[:_LINE]}")
        return reply.json()

    def replicas(self, model: str) -> list[dict[str, Any]]:
        """The statistics of the replicas that can compute, at most a second old."""
        models = self.json("GET", "/status.json")["models"]
        found = [each for named in models if named["name"] == model for each in named["replicas"]]
        return [replica for replica in found if replica["slots"]]

    def metric(self, name: str, label: str) -> float | None:
        """The sum of the series with this label; None without any."""
        text = httpx.get(f"{self.url}/metrics", timeout=REQUEST_S).text
        series = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        values = [float(line.rpartition(" ")[2]) for line in series if label in line]
        return sum(values) if values else None

    def processes(self, model: str) -> list[int]:
        """The ids of the processes of the model's replicas."""
        title = f"ray::ServeReplica:{APPLICATION}:{model}"
        return descendants(self.process.pid, lambda shown: shown.startswith(title))

    def log(self) -> list[LogLine]:
        text = (self.folder / "log").read_text(errors="replace")
        return [parse_line(line) for line in text.splitlines()]

    def trouble(self) -> list[str]:
        """The errors in the log, each with the last line that continues it."""
        found, is_error = list[str](), False
        for line in self.log():
            shown = f"{line.source}: {line.event} {dict(line.facts)}"[:_LINE]
            if line.level is not None:
                is_error = line.level == "error"
                found += [shown] if is_error else []
            elif is_error:
                found[-1] = f"{found[-1].partition(' ... ')[0]} ... {line.event}"[:_LINE]
        return found

    def print_log(self) -> None:
        """Prints the end of the log, and those of Ray's files of errors."""
        logs = self.folder / "ray" / "session_latest" / "logs"
        for path in (*sorted(logs.glob("*.err")), self.folder / "log"):
            lines = path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            print(f"--- {path.name}", *(line[:_LINE] for line in lines), sep="\n", flush=True)

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float) -> float:
        """Waits until `holds`, which may raise meanwhile; the seconds that this took. TimeoutError,
        and ServerEndedError if the server cannot serve."""
        began, reason = time.monotonic(), ""
        while time.monotonic() - began < timeout_s:
            if self.process.poll() is not None:
                raise ServerEndedError(f"its status is {self.process.returncode}")
            if any(line.event.startswith(_FAILED) for line in self.log()):
                raise ServerEndedError("the application could not be built; see its log")
            try:
                if holds():
                    return time.monotonic() - began
                reason = "it does not hold"
            except (httpx.HTTPError, RuntimeError) as error:
                reason = str(error)
            time.sleep(_POLL_S)
        raise TimeoutError(f"{what}: not within {timeout_s:g} s: {reason}")

    def stop(self) -> tuple[float, list[str]]:
        """Stops the server as Ctrl-C does; the seconds until all processes have ended, and the
        commands of those that have not, which are killed."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        while (left := self._started()) and time.monotonic() - began < _STOP_S:
            time.sleep(_POLL_S)
        took_s = time.monotonic() - began
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return took_s, list(left.values())

    def _started(self) -> dict[int, str]:
        """Commands by process id of all that has been started for this server."""
        found, mark = {}, f"RAY_TMPDIR={self.folder}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command and mark in (process / "environ").read_bytes():
                    found[int(process.name)] = command[:_LINE]
        return found


@contextmanager
def running_server(models: Sequence[dict[str, Any]]) -> Iterator[Server]:
    """Starts the configuration for one GPU, but with these models on free ports of this machine.
    Whatever is left of it at the end is killed."""
    with short_folder() as folder:
        config, port = yaml.safe_load(_CONFIG.read_text()), free_port()
        config["http_options"] = {"host": "127.0.0.1", "port": port}
        arguments = config["applications"][0]["args"]
        arguments.update(models=list(models), ingress_replicas=1, responses=None)
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.serve.scripts", "run", path],
                cwd=ROOT,
                env=environment({**os.environ, **_variables(folder)}, port, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=begin_server,
            )
        server = Server(f"http://127.0.0.1:{port}", folder, process)
        try:
            yield server
        finally:
            if server._started():
                server.stop()
            process.kill()
            process.wait()


def _variables(folder: Path) -> dict[str, str]:
    """Another folder and other ports than those of other servers, and metrics every two seconds."""
    command = folder / COMMAND  # which an installation has beside its interpreter
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m serve_app.haproxy "$@"\n')
    command.chmod(0o700)
    path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
        "RAY_TMPDIR": str(folder),
        "RAY_metrics_report_interval_ms": "2000",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "31001",
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": "32000",
        BINARY_VARIABLE: str(command),
    }
