"""`caravan serve configs/quickstart.yaml`, from its start to the end of all its processes."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ollama
import yaml

from tests.checkout import ROOT
from tests.loopback import free_port
from tests.patience import HANG_S
from tests.serve.application import await_http, eventually, short_folder

CARAVAN = Path(sys.executable).with_name("caravan")
OTHER_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)


def configuration(folder: Path, port: int) -> Path:
    """The quickstart configuration on free ports."""
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["http_options"]["port"] = port
    environment = config["controller_options"]["runtime_env"]["env_vars"]
    environment.update({name: str(free_port()) for name in OTHER_PORTS})
    path = folder / "quickstart.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def hostile_repository(folder: Path) -> Path:
    """A working directory with the model, and with modules that nothing may import."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "models").symlink_to(ROOT / "models")
    for name in ("click", "ray", "runtime", "yaml"):
        (repository / f"{name}.py").write_text("raise SystemExit('imported')")
    return repository


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes whose files of Ray are in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"RAY_TMPDIR={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue  # it has ended, or belongs to another user
    return [command for command in found if command]


def quickstart_report() -> dict[str, Any]:
    """The answer to a question, and what the command has logged. Fails unless an interrupt ends all
    processes."""
    with short_folder() as folder:
        return _report(folder)


def _report(folder: Path) -> dict[str, Any]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    folders = {"RAY_TMPDIR": folder, "XDG_STATE_HOME": folder, "PYTHONPATH": ROOT}
    environment = {**os.environ, **{name: str(path) for name, path in folders.items()}}
    shown, announced = folder / "shown", f"Caravan serves demo at http://localhost:{port}"
    with shown.open("wb") as log:
        server = subprocess.Popen(
            [CARAVAN, "serve", configuration(folder, port)],
            cwd=hostile_repository(folder),
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Whoever starts tests in the background has interrupts ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    try:
        await_http(url)
        pieces = ollama.Client(host=url, timeout=HANG_S).chat(
            "demo",
            [{"role": "user", "content": "Who are you?"}],
            stream=True,
            options={"temperature": 0},
        )
        answer = "".join(piece.message.content or "" for piece in pieces)
        eventually(lambda: announced in shown.read_text())
        logged = (folder / "caravan" / f"serve-{port}.log").read_text()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=HANG_S)
    eventually(lambda: processes_of(folder) == [])
    return {"answer": answer, "logged": logged}
