"""The commands of `make serve` and `make test`, their order, and the report of failures."""

import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.checkout import ROOT

TOOLS = ("python", "pip", "pytest", "ruff", "mypy", "lint-imports", "caravan")
# Notes its call in the file `calls`, and fails where the call holds what FAIL says.
STUB = """#!/bin/sh
call="$(basename "$0") $*"
echo "$call" >> calls
case "$call" in *"${FAIL:-nothing fails}"*) exit 1;; esac
"""
TESTS = {
    "cluster": "pytest tests/serve",
    "page": "pytest tests/page",
    "kernel and vision": "pytest tests/cuda tests/docs tests/kernels tests/parity/vision "
    "tests/unit/bench tests/unit/configs tests/unit/k8s tests/unit/tools",
    "parity": "pytest tests/parity tests/fuzz tests/soak tests/unit/model_zoo/gguf "
    "tests/unit/runtime --ignore tests/parity/vision",
    "other": "pytest --ignore tests/serve --ignore tests/page --ignore tests/cuda "
    "--ignore tests/docs --ignore tests/kernels --ignore tests/parity --ignore tests/fuzz "
    "--ignore tests/soak --ignore tests/unit/bench --ignore tests/unit/configs "
    "--ignore tests/unit/k8s --ignore tests/unit/model_zoo/gguf --ignore tests/unit/runtime "
    "--ignore tests/unit/tools",
}
PARTS = ("ruff check .", *TESTS.values())

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone whose virtual environment consists of stubs."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    kernels = tmp_path / "runtime" / "kernels"
    (kernels / "cpu").mkdir(parents=True)
    sources = (kernels / name for name in ("build.py", "cpu_levels.py", "cpu/a.c"))
    for name in ("pyproject.toml", "constraints.txt", *sources):
        (tmp_path / name).touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for tool in TOOLS:
        stub = tmp_path / ".venv" / "bin" / tool
        stub.write_text(STUB)
        stub.chmod(0o755)
    return tmp_path


def make(clone: Path, *targets: str, fail: str = "nothing fails") -> subprocess.CompletedProcess:
    """Run make without the variables of a make that runs these tests."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *targets],
        cwd=clone,
        env=environment | {"FAIL": fail},
        capture_output=True,
        text=True,
    )


def calls(clone: Path) -> list[str]:
    """The calls since this function was last called."""
    path = clone / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_all_parts_of_the_tests_pass(clone: Path) -> None:
    done = make(clone, "test")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("make test: passed")
    called = [part for part in calls(clone) if part.startswith(PARTS)]
    assert sorted(called) == sorted([*TESTS.values(), "ruff check ."])


def test_every_test_is_in_exactly_one_part() -> None:
    separate = {"peers", "hosts", "libraries", "arm", "real", "package", "capabilities"}
    for file in (ROOT / "tests").rglob("test_*.py"):
        if not separate.intersection(file.parts):
            parts = [command for command in TESTS.values() if runs(command, file)]
            assert len(parts) == 1, (file, parts)


def runs(command: str, file: Path) -> bool:
    """Whether the command of a part runs the tests of that file."""
    words = command.split()[1:]
    ignored = {word for option, word in pairwise(words) if option == "--ignore"}
    chosen = set(words) - ignored - {"--ignore"} or {"tests"}
    assert all((ROOT / folder).is_dir() for folder in chosen | ignored)
    within = {str(folder) for folder in file.relative_to(ROOT).parents}
    return bool(within & chosen) and not within & ignored


@pytest.mark.parametrize(
    ("fail", "named"),
    [
        ("mypy", "lint"),
        *((command, f"{part} tests") for part, command in TESTS.items()),
        (
            "pytest",
            "cluster tests, page tests, other tests, parity tests, kernel and vision tests",
        ),
    ],
)
def test_a_failing_part_does_not_stop_others_and_is_named_at_the_end(
    clone: Path, fail: str, named: str
) -> None:
    done = make(clone, "test", fail=fail)
    assert done.returncode != 0
    assert f"make test: FAILED: {named}\n" in done.stderr
    run = calls(clone)
    assert all(any(call.startswith(part) for call in run) for part in PARTS)


@pytest.mark.parametrize("target", ["serve", "test"])
def test_kernels_are_compiled_once_after_the_install_and_before_their_use(
    clone: Path, target: str
) -> None:
    assert make(clone, target).returncode == 0
    first = calls(clone)
    compiled = first.index("python -m runtime.kernels.native")
    installs = [n for n, call in enumerate(first) if call.startswith("pip install")]
    uses = [n for n, call in enumerate(first) if call.startswith(("pytest", "caravan serve"))]
    assert installs and max(installs) < compiled < min(uses)
    make(clone, target)
    assert "python -m runtime.kernels.native" not in calls(clone)


def test_kernels_are_compiled_again_when_their_sources_change(clone: Path) -> None:
    make(clone, "serve")
    calls(clone)
    stamp = (clone / ".venv" / "kernels").stat().st_mtime
    os.utime(clone / "runtime/kernels/cpu/a.c", (stamp + 10, stamp + 10))
    make(clone, "serve")
    assert "python -m runtime.kernels.native" in calls(clone)


def test_a_dry_run_runs_nothing(clone: Path) -> None:
    assert make(clone, "--dry-run", "test").returncode == 0
    assert calls(clone) == []


@pytest.mark.parametrize("fail", ["nothing fails", "pip-audit"])
def test_an_audit_that_learns_nothing_fails(clone: Path, fail: str) -> None:
    packagers = clone / ".cache" / "packagers" / "bin"
    packagers.mkdir(parents=True)
    (packagers / "pip-audit").write_text(STUB)
    (packagers / "pip-audit").chmod(0o755)
    (clone / "tests" / "package").mkdir(parents=True)
    (clone / "tests" / "package" / "requirements.txt").touch()
    (packagers.parent / "installed").touch()
    done = make(clone, "audit", fail=fail)
    (call,) = calls(clone)
    assert "--strict" in call
    if fail == "pip-audit":
        assert done.returncode == 2
        assert "make audit: FAILED" in done.stderr and "nothing is known" in done.stderr
    else:
        assert done.returncode == 0
        assert "make audit: passed" in done.stdout
