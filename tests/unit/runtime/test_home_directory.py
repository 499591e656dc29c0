"""Users without a home directory get one line that says what to set."""

import os
import pwd
from pathlib import Path

import pytest

from model_zoo.sources.hub import _token_file
from runtime.errors import ConfigurationError
from runtime.home_directory import expanded
from runtime.kernels import build
from serve_app.cli import prompt
from serve_app.cli.prompt import pictures_in
from tests.checkout import ROOT
from tests.unit.serve_app.cli.cli_runs import run

VARIABLES = ("CARAVAN_MODELS", "CARAVAN_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME", "OLLAMA_MODELS")
NOBODYS = "~no-such-user-here/m.gguf"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has neither HOME nor an entry among the users of this machine."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "HF_HOME", "HF_TOKEN_PATH", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert expanded("~/a b") == Path("/h/a b")
    assert expanded(Path("c/~")) == Path("c/~")


@pytest.mark.parametrize(
    "command",
    [("list",), ("logs",), ("show", "~/m.gguf"), ("import",), ("list", "--store", "~/s")],
    ids=" ".join,
)
def test_without_a_home_directory_commands_say_what_to_set(homeless, command) -> None:
    told = run(*command, status=1).stderr
    assert told.startswith("caravan: ~/") and told.count("\n") == 1
    assert "Set HOME, or else CARAVAN_MODELS, CARAVAN_CACHE and XDG_STATE_HOME." in told


def test_without_a_home_directory_no_cache_is_written_into_the_working_directory(homeless) -> None:
    with pytest.raises(ConfigurationError, match=r"no home directory\. Set HOME.*CARAVAN_CACHE"):
        build.cache_directory(os.environ)


def test_without_a_home_directory_there_is_no_token_and_no_history(homeless, monkeypatch) -> None:
    assert _token_file({}) is None
    monkeypatch.setattr(prompt.atexit, "register", pytest.fail)
    prompt._keep_history()


@pytest.mark.parametrize("command", ["show", "serve"])
def test_the_path_of_an_unknown_user_is_refused(command: str, tmp_path: Path) -> None:
    told = run(command, NOBODYS, status=1).stderr
    assert f"{NOBODYS}: no user no-such-user-here with a home directory is known here." in told


@pytest.mark.parametrize("picture", ["~/a.png", "~no-such-user-here/a.png"])
def test_a_message_may_name_a_picture_in_a_home_directory_that_is_not(homeless, picture) -> None:
    text = f"see {picture}"
    assert pictures_in(text) == (text, [])


def test_home_directories_are_found_in_one_place() -> None:
    using = {
        path.relative_to(ROOT).as_posix()
        for package in ("runtime", "model_zoo", "serve_app")
        for path in (ROOT / package).rglob("*.py")
        if "expanduser" in path.read_text() or "Path.home(" in path.read_text()
    }
    assert using == {"runtime/home_directory.py"}
