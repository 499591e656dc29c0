"""Completion in shells: commands, options, and models of the store and of a server."""

import asyncio
import os
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from model_zoo.store.store import Store
from serve_app.cli.main import COMMANDS, caravan
from tests.patience import HANG_S
from tests.unit.serve_app.cli.cli_runs import CARAVAN, put, run
from tests.unit.serve_app.fake_replicas import PretendReplica, ingress
from tests.unit.serve_app.sockets import listening

LOADED = """
import sys
from click.shell_completion import ShellComplete
from serve_app.cli.main import caravan
items = ShellComplete(caravan, {}, "caravan", "_").get_completions([], "")
print(len(items), sorted({"torch", "ray"} & set(sys.modules)))
"""


def completed(*words: str) -> list[str]:
    """The values offered for the last word."""
    *arguments, incomplete = words
    completer = ShellComplete(caravan, {}, "caravan", "_CARAVAN_COMPLETE")
    return [item.value for item in completer.get_completions(arguments, incomplete)]


def test_commands_and_options_are_completed():
    assert completed("") == list(COMMANDS)
    assert completed("sh") == ["show"]
    assert "--context" in completed("serve", "--con")
    assert completed("nothing", "x") == []
    assert completed("show", "--device", "") == ["auto", "cpu", "cuda"]


def test_completing_commands_loads_no_tensor_library():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.stdout == f"{len(COMMANDS)} []\n", done.stderr


@pytest.mark.parametrize("command", ["serve", "show", "rm", "verify", "cp", "pull"])
def test_models_of_the_store_are_completed(tmp_path, monkeypatch, command):
    for folder, name in (("own", "tiny:1b"), ("other", "tinier:2b")):
        put(Store(tmp_path / folder), name, {"model": b"x"})
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path / "own"))
    assert completed(command, "ti") == ["tiny:1b"]
    assert completed(command, "models/d") == ["models/d"]  # the shell completes paths
    if command != "serve":
        assert completed(command, "--store", str(tmp_path / "other"), "ti") == ["tinier:2b"]


async def test_models_of_the_server_are_completed():
    async with ingress(PretendReplica()) as app, listening(app) as port:
        for command in ("run", "stop"):
            host = f"http://127.0.0.1:{port}"
            words = (command, "--host", host, "d")
            (name,) = await asyncio.to_thread(completed, *words)
            assert name.partition(":")[0] == "demo"


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"models": [{"name": n} for n in ("a\nb", "-x", "$(x)", "a b", "good")]}),
        JSONResponse([1]),
        JSONResponse({"models": None}),
        JSONResponse({"models": [{}]}),
        JSONResponse({"error": "no"}, status_code=401),
        PlainTextResponse("no JSON"),
    ],
)
async def test_unusual_answers_are_no_errors(answer):
    async def tags(request):
        return answer

    async with listening(Starlette(routes=[Route("/api/tags", tags)])) as port:
        found = await asyncio.to_thread(completed, "run", "--host", f"127.0.0.1:{port}", "")
    assert found in ([], ["good"])
    assert (found == ["good"]) == (b"good" in answer.body)


@pytest.mark.parametrize("host", ["http://127.0.0.1:1", "http://x:y", "::::", "\0"])
def test_a_server_that_cannot_be_reached_is_no_error(host):
    assert completed("run", "--host", host, "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_those_of_the_variable(shell):
    environment = {**os.environ, "_CARAVAN_COMPLETE": f"{shell}_source"}
    done = subprocess.run(CARAVAN, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert run("completion", shell).stdout.endswith(done.stdout) and done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
def test_bash_completes_names_with_tags(tmp_path):
    put(Store(tmp_path / "store"), "tiny:1b", {"model": b"x"})
    program = tmp_path / "caravan"
    program.write_text(f'#!/bin/sh\nexec {" ".join(CARAVAN)} "$@"\n')
    program.chmod(0o755)
    script = run("completion", "bash").stdout
    script += "COMP_WORDS=(caravan rm tiny:); COMP_CWORD=2; _caravan_completion caravan\n"
    script += 'echo "${COMPREPLY[@]} ${COMP_WORDBREAKS//[!:]}."\n'
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CARAVAN_MODELS": str(tmp_path / "store")}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "tiny:1b .\n", done.stderr
