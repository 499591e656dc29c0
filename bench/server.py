"""HTTP servers to measure and attack: processes on the loopback interface, which `close` ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from serve_app.child_process import begin_server
from serve_app.cli.serve import environment
from tests.checkout import ROOT
from tests.loopback import free_port

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 90
ASK_EVERY_S = 0.05
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


class Server:
    """A process that serves `url`; the constructor returns when a replica describes the first
    model. `arguments`: of the application; `key`: an API key, if it needs one.

    `begun_at`, `answered_at`: the start of the process, and the time of that description, in
    seconds since the epoch.
    """

    def __init__(
        self,
        command: list[str],
        port: int,
        folder: tempfile.TemporaryDirectory[str],
        arguments: Mapping[str, Any],
        *,
        variables: Mapping[str, str],
        key: str | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._log = (Path(folder.name) / "log").open("w+")
        self.begun_at = time.time()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=begin_server,
        )
        self._wait_until_ready(arguments["models"][0]["name"], key)
        self.answered_at = time.time()

    @classmethod
    def of_ray(
        cls,
        arguments: Mapping[str, Any],
        *,
        key: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Self:
        """`caravan serve` with the quickstart configuration, except for port and arguments.
        `variables`: more of its environment."""
        port = free_port()
        folder = tempfile.TemporaryDirectory(prefix="caravan-bench-")
        config = yaml.safe_load(QUICKSTART.read_text())
        config["http_options"] = {"host": "127.0.0.1", "port": port}
        config["applications"][0]["args"] = arguments
        path = Path(folder.name) / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "serve_app.cli", "serve", str(path), "--verbose"]
        # Its own log would stay.
        own = {"XDG_STATE_HOME": folder.name, **(variables or {})}
        return cls(command, port, folder, arguments, variables=own, key=key)

    @classmethod
    def of_uvicorn(cls, arguments: Mapping[str, Any]) -> Self:
        """The same ingress and replica in one process, without Ray."""
        port = free_port()
        folder = tempfile.TemporaryDirectory(prefix="caravan-bench-")
        command = [sys.executable, "-m", "bench.plain", json.dumps(arguments), str(port)]
        spins = environment(os.environ, port, Path(folder.name))["GOMP_SPINCOUNT"]
        return cls(command, port, folder, arguments, variables={"GOMP_SPINCOUNT": spins})

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
            self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def _wait_until_ready(self, model: str, key: str | None) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with httpx.Client(headers=headers) as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if client.post(f"{self.url}/api/show", json={"model": model}).is_success:
                        return
                time.sleep(ASK_EVERY_S)
        message = self.log()[-4000:]
        self.close()
        raise SystemExit(f"The server did not become ready:\n{message}")
