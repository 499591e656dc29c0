"""Compilers that cannot compile the CPU kernels."""

import errno
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.kernels import build, build_failures, cpu_levels, native
from runtime.kernels.build import NativeUnavailableError
from tests.patience import HANG_S


@pytest.fixture
def failing(one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that fails, and notes its calls in `calls` beside it."""
    compiler = tmp_path / "failing-cc"
    compiler.write_text(f"#!/bin/sh\necho call >> {tmp_path}/calls\necho error: no >&2; exit 1\n")
    compiler.chmod(0o755)
    (tmp_path / "calls").touch()
    monkeypatch.setenv("CC", str(compiler))
    return compiler


def calls(compiler: Path) -> int:
    """Since the last call of this function."""
    noted = compiler.with_name("calls")
    count = len(noted.read_text().splitlines())
    noted.write_text("")
    return count


def compile_in_vain(reason: str) -> None:
    """As a new process does."""
    native.library.cache_clear()
    with pytest.raises(NativeUnavailableError, match=reason):
        build.built_library()


def test_a_compiler_that_fails_is_not_called_by_the_next_process(failing: Path) -> None:
    assert native.needs_compiling()
    compile_in_vain(r"failing-cc: error: no$")
    assert calls(failing) == len(cpu_levels.usable_levels({}))
    assert not native.needs_compiling()
    compile_in_vain(r"failing-cc: error: no \(as before; .* tries again\)$")
    assert calls(failing) == 0


def replace_compiler(compiler: Path, source: Path) -> None:
    compiler.write_text(compiler.read_text() + "# another version\n")


def replace_source(compiler: Path, source: Path) -> None:
    source.write_text("int one(void) { return 3; }\n")


def wait(compiler: Path, source: Path) -> None:
    long_ago = time.time() - build_failures.COUNTS_FOR_S - 60
    for file in compiler.parent.rglob("*.failed"):
        os.utime(file, (long_ago, long_ago))


def become_another_host(compiler: Path, source: Path) -> None:
    """Which has the same cache and compiler, but perhaps other headers."""
    for file in compiler.parent.rglob("*.failed"):
        file.rename(file.with_name(f"{file.stem[:-3]}abc.failed"))


def compile_ahead(compiler: Path, source: Path) -> None:
    build.forget_failures()


@pytest.mark.parametrize(
    "change", [replace_compiler, replace_source, wait, become_another_host, compile_ahead]
)
def test_a_compiler_that_has_failed_is_called_again_after_a_change(
    failing: Path, one_source: Path, change: Callable[[Path, Path], None]
) -> None:
    compile_in_vain("error: no$")
    calls(failing)
    change(failing, one_source)
    assert native.needs_compiling()
    compile_in_vain("error: no$")
    assert calls(failing) == len(cpu_levels.usable_levels({}))


@pytest.mark.parametrize(
    "end", ["kill -TERM $$", "echo 'Terminated signal terminated program cc1' >&2; exit 1"]
)
def test_a_compiler_that_was_ended_by_a_signal_is_called_again(failing: Path, end: str) -> None:
    """As when a service manager stops all processes of a service at once."""
    failing.write_text(f"#!/bin/sh\necho call >> {failing.parent}/calls\n{end}\n")
    for _ in range(2):
        compile_in_vain("failing-cc.*[tT]erminated|died with")
        assert calls(failing) == len(cpu_levels.usable_levels({}))
        assert native.needs_compiling()


def test_failures_in_a_folder_that_cannot_be_read_are_not_looked_for(
    failing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARAVAN_CACHE", f"/{'x' * 300}")  # not even root can read it
    native.main()
    assert calls(failing)


def test_compiling_ahead_tries_a_compiler_that_has_failed(
    failing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_in_vain("error: no$")
    calls(failing)
    native.main()
    assert calls(failing)
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage().endswith("error: no")


def test_a_compiler_without_the_best_instruction_set_is_called_for_it_once(
    failing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As gcc 10, which has no AMX; each process logs why it does not use the best kernels."""
    usable = cpu_levels.usable_levels({})
    if len(usable) < 2:
        pytest.skip("one instruction set only")
    unknown = usable[0].name
    failing.write_text(
        f'#!/bin/sh\necho call >> {failing.parent}/calls\ncase "$*" in *\\"{unknown}\\"*)\n'
        '  echo error: unknown option >&2; exit 1\nesac\nexec cc "$@"\n'
    )
    built = build.built_library()
    assert f"kernels-{usable[1].name}-" in built.name and calls(failing) == 3  # 2 compile, 1 links
    assert build.built_library() == built and not native.needs_compiling() and not calls(failing)
    for record in caplog.records:
        assert f"none for {unknown}: " in record.getMessage()
        assert "error: unknown option" in record.getMessage()
    assert len(caplog.records) == 2


def test_the_first_source_that_cannot_be_compiled_ends_the_others(
    one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the processes that compilers have started, which have their standard error."""
    (tmp_path / "source" / "two.c").touch()
    compiler = tmp_path / "slow-cc"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *one.c*) sleep {HANG_S}; esac\necho error: no >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(NativeUnavailableError, match=r"error: no$"):
        build.built_library()


def test_compilers_end_when_another_one_cannot_be_started(
    one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a user may have no more processes."""
    (tmp_path / "source" / "two.c").touch()
    compiler = tmp_path / "slow-cc"
    compiler.write_text(f"#!/bin/sh\nexec sleep {HANG_S}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_one(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(start(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(NativeUnavailableError, match=os.strerror(errno.EAGAIN)):
        build.built_library()
    assert started[0].returncode == -signal.SIGKILL, "it has ended before its folder is removed"
