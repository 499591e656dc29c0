"""`caravan run`, `ps` and `stop` against the whole ingress with a fake model."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.store.store import Store
from runtime.errors import GenerationFailedError
from serve_app.cli.prompt import pictures_in
from serve_app.cli.server import DEFAULT_HOST, Server, with_scheme
from serve_app.cli.temporary_server import is_on_this_machine, temporary_server
from serve_app.messages.tasks import ReplyOpening
from tests.checkout import ROOT
from tests.patience import until
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.cli.cli_runs import CARAVAN, put, run
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica, ingress
from tests.unit.serve_app.sockets import listening

PICTURE = Path("models/demo.png")
SEEING = dataclasses.replace(CARD, capabilities=("completion", "vision"))
INIT = Server.__init__
QWEN3 = ReplyOpening(format_of("tools <tool_call> <think> </think>"))


@asynccontextmanager
async def served(replica: PretendReplica, **access: Any) -> AsyncIterator[str]:
    async with ingress(replica, **access) as app, listening(app) as port:
        yield f"http://127.0.0.1:{port}"


async def caravan(host: str, command: str, *arguments: object, **options: Any) -> Result:
    return await asyncio.to_thread(run, command, "--host", host, *arguments, **options)


async def test_an_answer_is_printed():
    replica = PretendReplica()
    async with served(replica) as host:
        result = await caravan(
            host, "run", "demo", "How", "are you?", "--system", "Be brief.", "--set", "top_k=3",
            "--format", "json", "--verbose",
        )  # fmt: skip
    assert result.stdout == "Hello, world\n"
    assert "answer: 3 tokens" in result.stderr
    (task,) = replica.tasks
    assert [(m.role, m.text) for m in task.prompt.messages] == [
        ("system", "Be brief."),
        ("user", "How are you?"),
    ]
    assert task.sampling.top_k == 3
    assert task.output is not None


async def test_pictures_and_schemas_come_from_files(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    replica = PretendReplica()
    async with served(replica, max_body_bytes=2**20, card=SEEING) as host:
        await caravan(host, "run", "demo", "See", "--image", PICTURE, "--format", schema)
    (task,) = replica.tasks
    assert len(task.prompt.messages[0].images) == 1
    assert json.loads(task.output.source) == {"type": "object"}


async def test_paths_of_pictures_in_the_prompt_add_them_but_not_those_in_piped_text():
    replica = PretendReplica()
    async with served(replica, max_body_bytes=2**20, card=SEEING) as host:
        result = await caravan(host, "run", "demo", "See", PICTURE, piped=f"not {PICTURE}")
    (message,) = replica.tasks[0].prompt.messages
    assert len(message.images) == 1 and message.text == f"See\n\nnot {PICTURE}"
    assert f"(with {PICTURE})" in result.stderr


async def test_thinking_goes_to_standard_error():
    async with served(PretendReplica(("<think>\nhm\n</think>\n\n", "So."), QWEN3)) as host:
        result = await caravan(host, "run", "demo", "Hi")
        hidden = await caravan(host, "run", "demo", "Hi", "--hide-thinking")
    assert result.stdout == hidden.stdout == "So.\n"
    assert "hm" in result.stderr
    assert "hm" not in hidden.stderr


async def test_a_server_on_this_machine_is_not_reached_through_a_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with served(PretendReplica()) as host:
        assert "demo" in (await caravan(host, "ps")).stdout
        measured = await caravan(host, "bench", "demo", "--requests", "1", "--warm-up", "0")
        assert measured.exit_code == 0


async def test_errors_are_one_line_and_a_status():
    replica = PretendReplica()
    replica.error = GenerationFailedError("the engine broke")
    async with served(replica) as host:
        assert (await caravan(host, "run", "demo", "Hi", status=1)).stderr == (
            "caravan: the engine broke\n"
        )
        unknown = await caravan(host, "run", "nope", "Hi", status=1)
        assert unknown.stderr == "caravan: model 'nope' not found; the server has demo\n"
        assert "NAME=VALUE" in (await caravan(host, "run", "demo", "--set", "x", status=2)).stderr
        misspelt = await caravan(host, "run", "demo", "--set", "temperatur=1", status=2)
        assert "temperatur is not an option; did you mean temperature?\n" in misspelt.stderr
    assert "no server answers at" in (await caravan(host, "ps", status=1)).stderr
    assert "is no URL" in (await caravan("http://x:y", "ps", status=2)).stderr


async def test_a_key_is_read_from_the_environment(monkeypatch):
    async with served(PretendReplica(), api_keys=(api_key("secret"),)) as host:
        refused = await caravan(host, "run", "demo", "Hi", status=1)
        assert "set CARAVAN_API_KEY" in refused.stderr
        monkeypatch.setenv("CARAVAN_API_KEY", "secret")
        assert (await caravan(host, "run", "demo", "Hi")).stdout == "Hello, world\n"


@pytest.mark.parametrize(
    ("written", "stop"),
    [("end", "end"), ('"end"', "end"), ("42", "42"), ("true", "true"), ("null", "null")],
)
async def test_a_stop_string_is_a_list(written, stop):
    replica = PretendReplica()
    async with served(replica) as host:
        await caravan(host, "run", "demo", "Hi", "--set", f"stop={written}", "--set", "seed=3")
    assert (replica.tasks[0].stop, replica.tasks[0].sampling.seed) == ((stop,), 3)


async def test_a_model_of_the_configuration_stays_and_says_so():
    async with served(PretendReplica()) as host:
        result = await caravan(host, "stop", "demo")
    assert "demo stays loaded" in result.stderr


async def test_a_server_that_answers_is_used(monkeypatch):
    async with served(PretendReplica()) as host:
        monkeypatch.setattr(Server, "__init__", partialmethod(_init, host))
        result = await asyncio.to_thread(run, "run", "demo", "Hi")
    assert result.stdout == "Hello, world\n"


def _init(self: Server, host: str, default: str, key: str | None) -> None:
    assert default == DEFAULT_HOST
    INIT(self, host, key)


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "utf-8:strict"}, {"LC_ALL": "C"}], ids=str
)
def test_standard_input_that_is_not_text_is_refused_in_one_line(variables):
    """Python decodes it strictly or not, depending on the locale."""
    with PICTURE.open("rb") as picture:
        refused = subprocess.run(
            [*CARAVAN, "run", "demo", "What do you see?"], stdin=picture,
            env={**os.environ, **variables}, capture_output=True, text=True,
        )  # fmt: skip
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "standard input is not text in UTF-8" in refused.stderr and "--image" in refused.stderr


def test_only_files_sources_and_stored_models_start_a_server(tmp_path):
    store = Store(tmp_path)
    put(store, "mine", {"model": b"1"})
    assert is_on_this_machine("models/demo.gguf", store)
    assert is_on_this_machine("hf://org/repo", store)
    assert is_on_this_machine("mine", store)
    assert not is_on_this_machine("nope", store)
    assert not is_on_this_machine("a b", store)


# In place of `caravan serve`: says what its first argument is, and waits for the end.
PROGRAM = """
import signal, sys
from pathlib import Path
said, ended, model = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(f"starting {model}", file=sys.stderr, flush=True)
if said != "nothing":
    print(f"Caravan serves {said}", file=sys.stderr, flush=True)
    signal.sigwait({signal.SIGTERM})
Path(ended).touch()
"""


@pytest.mark.parametrize("said", ["demo at http://x", "none of the models yet at x", "nothing"])
def test_a_temporary_server_lasts_as_long_as_it_is_needed(tmp_path, said, capsys):
    ended = tmp_path / "ended"
    command = [sys.executable, "-c", PROGRAM, said, str(ended)]
    if said == "demo at http://x":
        with temporary_server("demo", command=command):
            assert not ended.exists()
    else:
        with pytest.raises(click.exceptions.Exit), temporary_server("demo", command=command):
            raise AssertionError("no server")
    assert ended.exists()
    assert "starting demo" in capsys.readouterr().err


def test_a_temporary_server_imports_no_modules_of_the_working_directory(
    tmp_path, monkeypatch, capsys
):
    """Which may be a downloaded model repository."""
    (tmp_path / "click.py").write_text("raise SystemExit('hostile')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(click.exceptions.Exit), temporary_server("./missing.gguf"):
        raise AssertionError("no server")
    assert "missing.gguf" in capsys.readouterr().err


async def test_loaded_models_are_listed():
    async with served(PretendReplica()) as host:
        assert "demo" in (await caravan(host, "ps")).stdout
        (model,) = json.loads((await caravan(host, "ps", "--json")).stdout)
    assert model["context_length"] == 512


async def test_the_end_of_keep_alive_is_in_local_time(monkeypatch):
    def loaded(*_: object) -> dict[str, Any]:
        details = {"quantization_level": "Q8_0"}
        model = {"name": "a", "digest": "0" * 64, "size": 1, "context_length": 9}
        return {"models": [model | {"details": details, "expires_at": "2026-11-29T22:43:40Z"}]}

    monkeypatch.setattr(Server, "get", loaded)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert "2026-11-30 07:43" in run("ps").stdout
        assert "2026-11-29T22:43:40Z" in run("ps", "--json").stdout
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("example.org", "http://example.org:8000"),
        ("example.org:80", "http://example.org:80"),
        ("[::1]", "http://[::1]:8000"),
        ("[::1]:9", "http://[::1]:9"),
        ("https://example.org/prefix/", "https://example.org/prefix"),
    ],
)
def test_hosts_may_lack_scheme_and_port(host, url):
    assert with_scheme(host) == url


@pytest.mark.parametrize("name", ["a b.png", "c.JPG"])
@pytest.mark.parametrize("written", ["'{}'", '"{}"', "{}"])
def test_paths_of_existing_pictures_are_taken_from_the_text(tmp_path, name, written):
    path = tmp_path / name
    path.write_bytes(b"")
    escaped = str(path).replace(" ", "\\ ") if written == "{}" else str(path)
    assert pictures_in(f"See {written.format(escaped)} now, not x.png") == (
        "See  now, not x.png",
        [path],
    )


async def test_a_conversation_in_a_terminal(tmp_path):
    replica = PretendReplica()
    picture = tmp_path / "p.png"
    picture.write_bytes(PICTURE.read_bytes())
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    async with served(replica, max_body_bytes=2**20, card=SEEING) as host:
        leader, follower = os.openpty()
        command = [*CARAVAN, "run", "--host", host, "demo"]
        process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, env=environment,
            start_new_session=True, preexec_fn=lambda: _take_terminal(follower),
        )  # fmt: skip
        os.close(follower)
        terminal = Terminal(leader)
        await terminal.open()
        await terminal.shows(">>> ")
        await terminal.types("/set system Be brief.\n", ">>> ")
        await terminal.types(f"{picture} See\n", "Hello, world")
        await terminal.types('"""/one\ntwo"""\n', "Hello, world")
        replica.waits.clear()
        await terminal.types("stop\n", "Hello")
        os.write(leader, b"\x03")  # Ctrl-C ends the answer only
        await until(lambda: replica.left == 1)
        replica.waits.set()
        await terminal.types("/set nothing\n", "/set knows")
        await terminal.types("/show\n", "messages")
        os.write(leader, b"/bye\n")
        assert await asyncio.to_thread(process.wait) == 0
    first, second, _ = replica.tasks
    assert len(first.prompt.messages[1].images) == 1
    assert [message.text for message in second.prompt.messages] == [
        "Be brief.", "See", "Hello, world", "/one\ntwo",
    ]  # fmt: skip
    assert "See" in (tmp_path / "caravan" / "history").read_text()


class Terminal:
    """The user's side of a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reader = asyncio.StreamReader()
        self._text = ""

    async def open(self) -> None:
        file = os.fdopen(self._descriptor, "rb", buffering=0)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)

    async def types(self, text: str, shown: str) -> None:
        """Type, and wait until the program shows this."""
        os.write(self._descriptor, text.encode())
        await self.shows(shown)

    async def shows(self, text: str) -> None:
        while text not in self._text:
            read = await self._reader.read(4096)
            assert read, f"the program ended after {self._text!r}"
            self._text += read.decode()
        self._text = self._text.partition(text)[2]


def _take_terminal(descriptor: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
