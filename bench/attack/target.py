"""The server that is attacked: `make serve` with a temporary configuration, or any other server."""

import hashlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import httpx
import yaml

from serve_app.cli.ray_folders import ray_folder

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 90.0
MAX_UPLOAD_BYTES = 64 * 2**20
# The name of a model whose file attacks may overwrite.
REWRITTEN = "rewritten"


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys of two clients that may use models, and of one that may also manage them."""

    alice: str = field(default_factory=lambda: f"sk-alice-{secrets.token_hex(16)}")
    bob: str = field(default_factory=lambda: f"sk-bob-{secrets.token_hex(16)}")
    manager: str = field(default_factory=lambda: f"sk-manager-{secrets.token_hex(16)}")

    def entries(self) -> list[dict[str, Any]]:
        """The entries of these keys in `api_keys_file`."""
        return [
            {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "manage": manage}
            for name, key, manage in (
                ("alice", self.alice, False),
                ("bob", self.bob, False),
                ("manager", self.manager, True),
            )
        ]


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `keys`: None if it accepts requests without keys.

    Set only for a server that was started here: `session`, Ray's directory with the logs; `store`,
    the folder of models; `rewritten`, the file of the model REWRITTEN.
    """

    url: str
    keys: Keys | None = None
    session: Path | None = None
    store: Path | None = None
    rewritten: Path | None = None

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 80

    @property
    def host(self) -> str:
        return httpx.URL(self.url).host

    @property
    def bystander_key(self) -> str | None:
        return None if self.keys is None else self.keys.bob

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120.0)


@contextmanager
def serving(keys: Keys | None) -> Iterator[Target]:
    """Runs `make serve` with temporary models, configuration and keys; waits until it answers."""
    with TemporaryDirectory(prefix="caravan-attack-") as place:
        folder = Path(place)
        port = _free_port()
        config = _config(folder, port, keys)
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        server = _Server.started(path, folder)
        try:
            server.wait_until_ready(f"http://127.0.0.1:{port}", keys)
            yield Target(
                f"http://127.0.0.1:{port}",
                keys,
                (ray_folder(os.environ) / "ray" / "session_latest").resolve(),
                folder / "store",
                folder / "rewritten.gguf",
            )
        finally:
            server.stop()


def _config(folder: Path, port: int, keys: Keys | None) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    arguments = config["applications"][0]["args"]
    arguments["models"][0]["source"] = str(ROOT / "models" / "demo.gguf")
    arguments["models"][0]["threads"] = 1
    if keys is None:
        return config
    arguments.pop("api_keys", None)
    path = folder / "keys.yaml"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(keys.entries()))
    arguments["api_keys_file"] = str(path)
    source = str(shutil.copy(ROOT / "models" / "demo.gguf", folder / "rewritten.gguf"))
    arguments["models"].append(
        {**arguments["models"][0], "name": REWRITTEN, "source": source, "num_cpus": 0.2}
    )
    arguments["models"][0]["num_cpus"] = 0.2
    arguments["on_demand"] = {
        "num_cpus": 0.2,
        "max_upload_bytes": MAX_UPLOAD_BYTES,
        "model": {"context_tokens": 512, "threads": 1},
    }
    return config


class _Server:
    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process, self._log = process, log

    @classmethod
    def started(cls, config: Path, folder: Path) -> Self:
        """Starts the server with the `make` that runs this program, if there is one."""
        make = shlex.split(os.environ.get("CARAVAN_MAKE", "make"))
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*make, "serve", f"CONFIG={config}", "VERBOSE=1"],
                cwd=ROOT,
                env={**os.environ, "CARAVAN_MODELS": str(folder / "store")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )
        return cls(process, log)

    def wait_until_ready(self, url: str, keys: Keys | None) -> None:
        """Waits until the demo model has answered; SystemExit with the log if it does not."""
        headers = {} if keys is None else {"authorization": f"Bearer {keys.bob}"}
        body = {"model": "demo", "prompt": "Hello", "stream": False, "options": {"num_predict": 2}}
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.HTTPError):
                answer = httpx.post(f"{url}/api/generate", json=body, headers=headers, timeout=60)
                if answer.is_success:
                    return
            time.sleep(0.5)
        log = self._log.read_text(errors="replace")[-4000:]
        raise SystemExit(f"make serve does not answer:\n{log}")

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
