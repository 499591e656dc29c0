"""HTTP servers to measure: processes on the loopback interface, which `close` ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
ASK_EVERY_S = 0.05
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


class Server:
    """A process that serves `url`; the constructor returns when it is ready.

    `begun_at`, `answered_at`: the start of the process, and the first time at which a replica
    described its model, in seconds since the epoch.
    """

    def __init__(
        self, command: list[str], port: int, folder: tempfile.TemporaryDirectory, model: str
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._log = (Path(folder.name) / "log").open("w+")
        self.begun_at = time.time()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Background jobs of a shell ignore SIGINT, and their children inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self._wait_until_ready(model)
        self.answered_at = time.time()

    @classmethod
    def of_ray(cls, model: dict[str, Any]) -> Self:
        """`serve run` with the quickstart configuration, except for port and model."""
        port = free_port()
        folder = tempfile.TemporaryDirectory(prefix="caravan-bench-")
        config = yaml.safe_load(QUICKSTART.read_text())
        config["http_options"] = {"host": "127.0.0.1", "port": port}
        config["applications"][0]["args"]["models"] = [model]
        path = Path(folder.name) / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
        return cls(command, port, folder, model["name"])

    @classmethod
    def of_uvicorn(cls, model: dict[str, Any]) -> Self:
        """The same ingress and replica in one process, without Ray."""
        port = free_port()
        folder = tempfile.TemporaryDirectory(prefix="caravan-bench-")
        settings = json.dumps({"models": [model]})
        command = [sys.executable, "-m", "bench.plain", settings, str(port)]
        return cls(command, port, folder, model["name"])

    def log(self) -> str:
        """The log so far."""
        return Path(self._log.name).read_text(errors="replace")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()
        self._folder.cleanup()

    def _wait_until_ready(self, model: str) -> None:
        """Waits until a replica describes its model."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client() as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if client.post(f"{self.url}/api/show", json={"model": model}).is_success:
                        return
                time.sleep(ASK_EVERY_S)
        message = self.log()[-4000:]
        self.close()
        raise SystemExit(f"The served application did not become ready:\n{message}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
