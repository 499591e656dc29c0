"""The process of Ray's command `serve`, with a program in place of Ray."""

import os
import subprocess
import sys
from pathlib import Path

from serve_app.haproxy import CONFIG_VARIABLE
from serve_app.temporary_folders import temporary_folder
from tests.checkout import ROOT
from tests.patience import wait_until

# As Ray's worker: a hook ends the other processes, and handlers end this one.
SCRIPTS = """
import atexit, pathlib, signal, sys, time

def end():
    pathlib.Path("ending").touch()
    while not pathlib.Path("may end").exists():
        time.sleep(0.01)
    pathlib.Path("ended").write_text(str(signal.alarm(0)))

atexit.register(end)

def cli(prog_name):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    signal.alarm(3600)
    print("started", flush=True)
    signal.pause()
"""


def test_nothing_interrupts_the_end_of_rays_processes(tmp_path: Path) -> None:
    """A killed parent sends SIGTERM for each of its threads, and Ray's handler SIGALRM later. The
    folder that it has made for HAProxy stays until then."""
    proxy = tmp_path / "proxy-1"
    proxy.mkdir()
    (proxy / "caravan-in-use").touch()
    package = tmp_path / "ray" / "serve"
    package.mkdir(parents=True)
    (package / "scripts.py").write_text(SCRIPTS)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "serve_app.cli.ray_serve"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={
            **os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            CONFIG_VARIABLE: f"{proxy}/haproxy.cfg",
        },
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.terminate()
        wait_until((tmp_path / "ending").exists)
        with temporary_folder("proxy-", within=tmp_path):
            assert proxy.exists()
        process.terminate()
        (tmp_path / "may end").touch()
    assert (tmp_path / "ended").read_text() == "0", "no alarm is left"
    with temporary_folder("proxy-", within=tmp_path):
        assert not proxy.exists()
