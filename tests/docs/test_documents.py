"""Every command, configuration and program in the documents is parsed by its real parser."""

import ast
import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from model_zoo.families import TEXT_FAMILIES
from serve_app.api.openapi_operations import OPERATIONS
from serve_app.check import application_arguments
from serve_app.cli.main import COMMANDS, caravan
from serve_app.config.settings import read_settings
from tests.checkout import ROOT
from tests.serve_configs import parsed

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "configs/*.md", "k8s/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"'\$\(base64 [^)]*\)'")  # the contents of a file within a quoted argument
# Programs of others, whose arguments are not checked.
OTHERS = {
    "chmod",
    "cluster=",
    "docker",
    "echo",
    "export",
    "helm",
    "kubectl",
    "mkdir",
    "openssl",
    "password=",
    "pip",
    "sleep",
}


def blocks(path: Path) -> Iterator[tuple[str, str, int]]:
    """Language, text and line of each fenced block."""
    text = path.read_text()
    for match in FENCE.finditer(text):
        yield match[2], textwrap.dedent(match[3]), text.count("\n", 0, match.start()) + 1


def cases(*languages: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{path.relative_to(ROOT)}:{line}")
        for path in DOCUMENTS
        for language, text, line in blocks(path)
        if language in languages
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command; quoted arguments may have several lines."""
    pending = ""
    for line in IMAGE.sub("aGk=", text).splitlines():
        pending += line + "\n"
        lexer = shlex.shlex(pending.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quote is open
            continue
        if pending.rstrip().endswith("\\"):
            continue
        pending = ""
        command: list[str] = []
        for word in [*words, ";"]:
            if word in ("|", "&&", ";"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)
    assert not pending.strip(), f"a quote is never closed: {pending}"


def check_caravan(words: list[str]) -> None:
    words = list(itertools.takewhile(lambda word: word not in (">", ">>"), words))
    command: click.Command = caravan
    arguments = words[1:]
    context = click.Context(command)
    while isinstance(command, click.Group) and arguments:
        found = command.get_command(context, arguments[0])
        assert found is not None, f"caravan has no command {arguments[0]}"
        command, arguments = found, arguments[1:]
    with pytest.MonkeyPatch.context() as patch:
        for kind in (click.Path, click.File):  # files that the reader has
            patch.setattr(kind, "convert", lambda self, value, param, ctx: value)
        command.make_context(command.name, list(arguments))


def check_make(words: list[str]) -> None:
    targets = {word for word in words[1:] if "=" not in word}
    _, _, phony = (ROOT / "Makefile").read_text().partition(".PHONY:")
    assert targets <= set(phony.splitlines()[0].split())


def check_curl(words: list[str]) -> None:
    (url,) = (word for word in words if "://" in word)
    path = "/" + url.partition("://")[2].partition("/")[2].partition("?")[0]
    data = words[words.index("-d") + 1] if "-d" in words else None
    method = "POST" if data is not None else "GET"
    operations = {(each.method, each.path): each for each in OPERATIONS}
    assert (method, path) in operations, f"no operation {method} {path}"
    body = operations[method, path].body
    if data is not None:
        assert body is not None
        assert not body.model_validate(json.loads(data)).model_extra, "a field is unknown"


def check_pytest(words: list[str]) -> None:
    files = [word for word in words[1:] if word.startswith("tests/")]
    assert files and all((ROOT / file).exists() for file in files)


def check_python(words: list[str]) -> None:
    assert words[1] == "-m" and find_spec(words[2]) is not None, words


def check_ray(words: list[str]) -> None:
    module = {"ray": "ray.scripts.scripts", "serve": "ray.serve.scripts"}[words[0]]
    command = importlib.import_module(module).cli.commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, words


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "caravan": check_caravan,
    "make": check_make,
    "curl": check_curl,
    "pytest": check_pytest,
    "python": check_python,
    "ray": check_ray,
    "serve": check_ray,
}


@pytest.mark.parametrize("text", cases("console", "sh", "bash", ""))
def test_commands(text: str) -> None:
    for words in commands(text):
        name = words[0].removeprefix(".venv/bin/")
        if "=" in name:
            name = name.partition("=")[0] + "="
        if name not in OTHERS:
            assert name in PROGRAMS, f"unknown program: {words}"
            PROGRAMS[name]([name, *words[1:]])


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_help(name: str) -> None:
    context = click.Context(caravan)
    command = caravan.get_command(context, name)
    assert command is not None and command.epilog
    for words in commands(command.epilog.partition(":")[2]):
        if words[0] == "caravan":
            check_caravan(words)


def test_the_architectures_that_ranks_cannot_divide_are_listed() -> None:
    text = (ROOT / "configs" / "README.md").read_text()
    (listed,) = re.findall(r"\(all architectures except (.*?)\)", text)
    undivided = {name for name, row in TEXT_FAMILIES.items() if not row.tensor_parallel}
    assert set(re.findall(r"`(.*?)`", listed)) == undivided


def test_the_page_of_the_command_line_has_every_command() -> None:
    _, listed, _ = next(blocks(ROOT / "docs/command-line.md"))
    assert {words[1] for words in commands(listed)} == set(COMMANDS)


@pytest.mark.parametrize("text", cases("yaml"))
def test_configurations(text: str) -> None:
    """Whole files are those of Serve, and state who may connect; parts are keys of `args`, or of
    entries of lists in it."""
    value = yaml.safe_load(text)
    if "apiVersion" in value:
        return  # manifests: tests/unit/k8s
    if "applications" not in value:
        demo = {"name": "demo", "source": "models/demo.gguf"}
        read_settings({"models": [demo], **value})
        return
    parsed(text)
    assert "host" in value["http_options"]
    for args in application_arguments(value):
        read_settings(args)


@pytest.mark.parametrize("text", cases("python"))
def test_programs(text: str) -> None:
    entry = text.startswith('"')  # of a table of the sources
    for node in ast.walk(ast.parse(f"{{{text}}}" if entry else text)):
        if isinstance(node, ast.Import):
            assert all(find_spec(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert find_spec(node.module)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "index.html").exists()
