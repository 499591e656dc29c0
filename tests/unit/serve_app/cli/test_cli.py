"""The command `caravan` as a process: its script, exit statuses and imports."""

import json
import os
import subprocess
import sys

import pytest

from model_zoo.store.store import Store
from serve_app.cli import serving_memory
from serve_app.cli.main import COMMANDS, caravan
from tests.patience import HANG_S
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.cli.cli_runs import CARAVAN, put, run

RUN_ALL = """
import contextlib, json, sys
from serve_app.cli.main import caravan
for arguments in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit):
        caravan(arguments)
    assert not {"torch", "ray"}.intersection(sys.modules), arguments
"""


def process(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=HANG_S)


def test_the_installed_script_lists_models_and_reports_an_error(tmp_path):
    store = Store(tmp_path / "store")
    put(store, "kept", {"model": b"x"})
    done = process(*CARAVAN, "list", "--json", "--store", store.root)
    assert done.returncode == 0, done.stderr
    assert [model["name"] for model in json.loads(done.stdout)] == ["kept:latest"]
    failed = process(*CARAVAN, "rm", "nobody", "--store", store.root)
    assert failed.returncode == 1 and failed.stdout == ""
    assert len(failed.stderr.splitlines()) == 1 and "nobody" in failed.stderr


def test_a_closed_pipe_is_no_error(tmp_path):
    unread, pipe = os.pipe()
    os.close(unread)
    command = [*CARAVAN, "list", "--json", "--store", str(tmp_path)]
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=HANG_S)
    os.close(pipe)
    assert done.stderr == b""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error_and_keep_their_numbers(closed):
    program = (
        "import os, sys\nfrom serve_app.cli import main\n"
        "def command(**_):\n"
        "    print('out', flush=True), print('error', file=sys.stderr), sys.stdin.read()\n"
        "    sys.exit(7 if os.open('/dev/null', os.O_RDONLY) > 2 else 1)\n"
        "main.caravan = command\nmain.main()"
    )
    script = f'exec "$0" -c "$1" {closed}'
    command = ["sh", "-c", script, sys.executable, program]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stderr) == (7, "" if "2>&-" in closed else "error\n")
    assert done.stdout == ("" if closed != "2>&-" and ">&-" in closed else "out\n")


@pytest.mark.parametrize(
    "arguments", [["show"], ["shw"], ["rm"], ["pull"], ["show", "x", "--slots", "0"]]
)
def test_usage_errors_end_with_2(arguments):
    assert "Usage: " in run(*arguments, status=2).stderr


@pytest.mark.parametrize(("wrong", "meant"), [("shw", "show"), ("lst", "list"), ("remove", None)])
def test_an_unknown_command_suggests_a_similar_one(wrong, meant):
    reported = run(wrong, status=2).stderr
    assert f"'{wrong}'" in reported
    assert f"did you mean `{meant}`?" in reported if meant else "did you mean" not in reported


def test_errors_are_json_with_the_option_json(tmp_path):
    result = run("show", tmp_path / "nowhere.gguf", "--json", status=1)
    assert "nowhere.gguf" in json.loads(result.stdout)["error"] and result.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_is_listed(name):
    shown = run(name, "--help").stdout
    assert "--help" in shown and f"  caravan {name}" in shown.partition("Example")[2]
    assert f"  {name} " in run("--help").stdout


def test_a_command_imports_only_what_it_needs(tmp_path):
    store = ["--store", str(tmp_path / "store")]
    commands = [["--help"], ["rm", "nobody", *store], ["verify", *store], ["list", *store]]
    done = process(sys.executable, "-c", RUN_ALL, json.dumps(commands))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("watched", [True, False])
def test_compiling_the_kernels_is_noted_on_a_terminal(tmp_path, monkeypatch, capsys, watched):
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    monkeypatch.setattr(serving_memory, "needs_compiling", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched)
    caravan(["show", str(path), "--device", "cpu"], standalone_mode=False)
    assert ("compiling the CPU kernels" in capsys.readouterr().err) == watched
