"""Temporary folders are removed, including those of killed processes."""

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

from serve_app.temporary_folders import hold, temporary_folder

HOLDING = """
import sys
from pathlib import Path
from serve_app.temporary_folders import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from serve_app.temporary_folders import temporary_folder
with temporary_folder("a-", within=Path(sys.argv[1])) as folder:
    (folder / "file").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_private_and_removed(tmp_path: Path) -> None:
    with temporary_folder("a-", within=tmp_path) as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    (abandoned,) = tmp_path.iterdir()
    unknown, outside = tmp_path / "a-unknown", tmp_path / "outside"
    for each in (unknown, outside):
        each.mkdir()
    (unknown / "in-use").touch()
    (outside / "caravan-in-use").touch()
    (tmp_path / "a-link").symlink_to(outside)
    with (
        temporary_folder("a-", within=tmp_path) as first,
        temporary_folder("a-", within=tmp_path) as second,
    ):
        assert first.exists() and second.exists() and not abandoned.exists()
    assert {each.name for each in tmp_path.iterdir()} == {"a-unknown", "a-link", "outside"}
    assert (unknown / "in-use").exists() and (outside / "caravan-in-use").exists()


def test_a_folder_stays_while_another_process_uses_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    (used,) = tmp_path.iterdir()
    command = [sys.executable, "-c", HOLDING, used]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with temporary_folder("a-", within=tmp_path):
            assert (used / "file").exists()
        process.communicate("")
    with temporary_folder("a-", within=tmp_path):
        assert not used.exists()


def test_folders_without_a_lock_cannot_be_held(tmp_path: Path) -> None:
    hold(tmp_path)
    hold(tmp_path / "missing")
