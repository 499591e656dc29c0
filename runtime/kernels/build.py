"""Compiles the CPU kernels: one library for each instruction set, into wheels or into a cache.

The name of a library has its instruction set and digests: one of sources and options, so a library
in a wheel and one that this machine has compiled are found in the same way, and one of its content,
because to load a damaged library may end the process. Where the cache cannot be
written, is full or is mounted noexec, a folder of this user among the temporary files takes its
place.
"""

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from runtime.home_directory import expanded
from runtime.kernels import build_failures
from runtime.kernels.cpu_levels import LEVELS, Level, machine, usable_levels
from runtime.mapped_removal import remove_unmapped

_log = logging.getLogger(__name__)

PREBUILT = Path(__file__).parent / "prebuilt"
WANTED = "CARAVAN_BUILD_KERNELS"  # the environment variable with the levels of a wheel
_SOURCES = Path(__file__).parent / "cpu"
_COMPILERS = ("gcc", "cc", "clang")
# Without contraction, all code paths round sums in the same way; see matmul.c.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
_COMPILE_TIMEOUT_S = 3600  # for a compiler that hangs
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
# Libraries that no process has loaded for so long are removed after a compilation.
UNUSED_AGE_S = 7 * 24 * 3600.0
_KNOWN = "as before; `python -m runtime.kernels.native` tries again"


class NativeUnavailableError(Exception):
    """There are no native kernels on this machine; the message has the reason."""


def built_library(
    *, flags: Sequence[str] = FLAGS, directory: Path | None = None, level: Level | None = None
) -> Path:
    """The library of the best instruction set (or of `level`), from a wheel or as this machine has
    compiled it; otherwise it is compiled now. A compiler that has failed lately for the same
    sources is not tried again. `directory`: the only place for compiled libraries, by default the
    cache, else a temporary folder. Raises NativeUnavailableError, and ConfigurationError as
    `usable_levels` does."""
    places = _places(os.environ) if directory is None else [_Place(directory)]
    usable, reasons = [*places], dict[str, None]()
    wanted = usable_levels(os.environ) if level is None else (level,)
    for each in wanted:
        found = _find(each, flags, places) or _compiled(each, flags, places, usable, reasons)
        if found is not None:
            with contextlib.suppress(OSError):  # it may belong to another user
                os.utime(found)  # by which `_remove_unused` finds that it is used
            if reasons and each != wanted[0]:
                text = "Using the CPU kernels for %s, because there are none for %s: %s"
                _log.warning(text, each.name, wanted[0].name, "; ".join(reasons))
            return found
    raise NativeUnavailableError("; ".join(reasons) or "there is no C compiler (gcc, cc or clang)")


def would_compile() -> bool:
    """Whether `built_library` would compile, which takes 10 to 40 seconds of processor time."""
    places = _places(os.environ)
    for level in usable_levels(os.environ):
        if _find(level, FLAGS, places):
            return False
        compilers = _available_compilers(os.environ, level.machine)
        if any(_failure(compiler, level, FLAGS, places) is None for compiler in compilers):
            return True
    return False


def forget_failures() -> None:
    """Makes `built_library` try all compilers again."""
    for place in _places(os.environ):
        build_failures.forget(place.folder)


def prebuild(folder: Path, environ: Mapping[str, str]) -> list[Path]:
    """Compile the libraries of a wheel into `folder`: the levels that CARAVAN_BUILD_KERNELS names,
    "all", or by default the best one of this processor. Leaves out what cannot be compiled."""
    shutil.rmtree(folder, ignore_errors=True)  # libraries of an earlier build
    built = []
    for level in _wanted_levels(environ):
        for compiler in _available_compilers(environ, level.machine):
            try:
                built.append(compile_library(compiler, level, FLAGS, folder))
                break
            except (OSError, subprocess.SubprocessError) as error:
                _log.warning("No kernels for %s: %s", level.name, _reason(compiler, error))
    return built


def cache_directory(environ: Mapping[str, str]) -> Path:
    """`$CARAVAN_CACHE`, else the user's cache directory. ConfigurationError: there is neither."""
    if chosen := environ.get("CARAVAN_CACHE"):
        return Path(chosen)
    if standard := environ.get("XDG_CACHE_HOME"):
        return Path(standard) / "caravan"
    return expanded("~/.cache/caravan")


def compile_library(compiler: str, level: Level, flags: Sequence[str], directory: Path) -> Path:
    """Compile all sources in parallel, each in its own process.

    Built in a temporary folder and renamed, so that several processes may compile concurrently.
    """
    options = [*flags, *level.flags, f'-DCARAVAN_LEVEL="{level.name}"']
    _log.info("Compiling the CPU kernels for %s with %s into %s.", level.name, compiler, directory)
    started = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as folder:
        # In English, for `_is_disk_full`, and without files on another disk.
        environment = {**os.environ, "LC_ALL": "C", "TMPDIR": folder}
        objects = [Path(folder) / f"{source.stem}.o" for source in sorted(_SOURCES.glob("*.c"))]
        _run_all(
            [
                [compiler, *options, "-c", str(_SOURCES / f"{o.stem}.c"), "-o", str(o)]
                for o in objects
            ],
            environment,
        )
        # Linked without OpenMP: its functions come from the runtime that torch loaded.
        built = Path(folder) / "kernels.so"
        command = [compiler, "-shared", *map(str, objects), "-lm", "-o", str(built)]
        subprocess.run(
            command, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S, env=environment
        )
        with built.open("rb") as file:
            os.fsync(file.fileno())  # the name must not outlive the content
        target = directory / _file_name(_stem(level, flags), built)
        os.replace(built, target)
    _remove_unused(directory)
    _log.info("Compiled the CPU kernels in %.1f s.", time.monotonic() - started)
    return target


def _run_all(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
    """Run compilers concurrently; the first one that fails ends the others."""
    running: list[subprocess.Popen[bytes]] = []
    waiting: list[Future[None]] = []
    with ThreadPoolExecutor(len(commands)) as pool:
        try:
            for command in commands:
                process = subprocess.Popen(
                    command,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environment,
                    process_group=0,  # gcc does not end the processes that it starts
                )
                running.append(process)
                waiting.append(pool.submit(_wait, process))
            for ended in as_completed(waiting):
                ended.result()
        finally:
            for process in running:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes]) -> None:
    _, complaint = process.communicate(timeout=_COMPILE_TIMEOUT_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, stderr=complaint)


def _remove_abandoned(directory: Path) -> None:
    """The temporary folders of processes that were killed: those in which nothing was created for
    longer than a compilation waits for its compiler."""
    oldest = time.time() - 2 * _COMPILE_TIMEOUT_S
    for folder in directory.glob("build-*"):
        with contextlib.suppress(OSError):  # another process removes it
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(directory: Path) -> None:
    """Libraries of earlier versions. Those of another installation that is in use are loaded from
    time to time, and stay; so do those that a process has loaded (`runtime.kernels.native`)."""
    oldest = time.time() - UNUSED_AGE_S
    for library in directory.glob("kernels-*.so"):
        with contextlib.suppress(OSError):  # another process or user removes it
            if library.stat().st_mtime < oldest and remove_unmapped(library):
                _log.info("Removed unused CPU kernels of an earlier version.")
    build_failures.forget(directory, older_than_s=build_failures.COUNTS_FOR_S)


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder of compiled libraries. `temporary`: it is among the files of all users, so it is
    used only if it belongs to this user alone."""

    folder: Path
    temporary: bool = False

    def find(self, stem: str) -> Path | None:
        """The library whose name begins with `stem` and matches its content."""
        try:
            usable = self._is_safe() and not self._is_noexec()
            found = sorted(self.folder.glob(f"{stem}-*.so")) if usable else []
            return next((path for path in found if path.name == _file_name(stem, path)), None)
        except OSError:  # no permission
            return None

    def failure(self, stem: str, compiler: str) -> str | None:
        """Why the compiler cannot make the library whose name begins with `stem`, if it has failed
        lately."""
        try:
            return (
                build_failures.remembered(self.folder, stem, compiler) if self._is_safe() else None
            )
        except OSError:
            return None

    def obstacle(self) -> str | None:
        """Why no library can be compiled into the folder, which is created if it does not exist."""
        try:
            self.folder.mkdir(0o700 if self.temporary else 0o777, parents=True, exist_ok=True)
            if self._is_noexec():
                return f"{self.folder} is mounted noexec; set CARAVAN_CACHE to another folder"
            if self._is_safe():
                with tempfile.TemporaryFile(dir=self.folder):
                    return None
        except OSError:
            pass
        return f"{self.folder} cannot be written by this user, or by others too"

    def _is_noexec(self) -> bool:
        """Whether no library in the folder can be loaded, because of the options of its mount."""
        return bool(os.statvfs(self.folder).f_flag & os.ST_NOEXEC)

    def _is_safe(self) -> bool:
        if not self.temporary:
            return True
        status = self.folder.lstat()
        closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        return closed and status.st_uid == os.geteuid()


def _places(environ: Mapping[str, str]) -> list[_Place]:
    """Of compiled libraries, the best first."""
    cache = _Place(cache_directory(environ))
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError:  # none can be written
        return [cache]
    return [cache, _Place(temporary / f"caravan-kernels-{os.geteuid()}", temporary=True)]


def _find(level: Level, flags: Sequence[str], places: Iterable[_Place]) -> Path | None:
    stem = _stem(level, flags)
    found = (place.find(stem) for place in (_Place(PREBUILT), *places))
    return next((path for path in found if path), None)


def _compiled(
    level: Level,
    flags: Sequence[str],
    places: Iterable[_Place],
    usable: list[_Place],
    reasons: dict[str, None],
) -> Path | None:
    """The library, compiled by the first compiler that can; otherwise None, with more `reasons`."""
    for compiler in _available_compilers(os.environ, level.machine):
        if failure := _failure(compiler, level, flags, places):
            reasons[f"{failure} ({_KNOWN})"] = None
        elif built := _compiled_by(compiler, level, flags, usable, reasons):
            return built
    return None


def _failure(
    compiler: str, level: Level, flags: Sequence[str], places: Iterable[_Place]
) -> str | None:
    stem = _stem(level, flags)
    failures = (place.failure(stem, compiler) for place in places)
    return next((failure for failure in failures if failure), None)


def _compiled_by(
    compiler: str,
    level: Level,
    flags: Sequence[str],
    usable: list[_Place],
    reasons: dict[str, None],
) -> Path | None:
    """As `_compiled`, in the first of `usable` with space for the library. Places that cannot be
    used or are full are removed from the list."""
    for place in [*usable]:
        if obstacle := place.obstacle():
            reasons[obstacle] = None
        else:
            try:
                return compile_library(compiler, level, flags, place.folder)
            except (OSError, subprocess.SubprocessError) as error:
                reason = _reason(compiler, error)
                if not _is_disk_full(error):
                    reasons[reason] = None
                    if _is_lasting(error):
                        build_failures.remember(place.folder, _stem(level, flags), compiler, reason)
                    return None
                reasons[f"{reason} ({place.folder})"] = None
        usable.remove(place)
    return None


def _stem(level: Level, flags: Sequence[str]) -> str:
    """The part of a library's name that is known before it is compiled."""
    digest = hashlib.sha256()
    for part in (*flags, *level.flags):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"kernels-{level.name}-{digest.hexdigest()[:24]}"


def _file_name(stem: str, library: Path) -> str:
    return f"{stem}-{hashlib.sha256(library.read_bytes()).hexdigest()[:24]}.so"


def _wanted_levels(environ: Mapping[str, str]) -> tuple[Level, ...]:
    names = environ.get(WANTED, "").split()
    if not names:
        return usable_levels({})[:1]
    named = tuple(level for level in LEVELS if level.name in names)
    if unknown := set(names) - {level.name for level in named} - {"all"}:
        known = ", ".join(level.name for level in LEVELS)
        raise SystemExit(f"{WANTED} has {' '.join(sorted(unknown))}; there are {known}, or all.")
    return LEVELS if "all" in names else named


def _available_compilers(environ: Mapping[str, str], target_machine: str) -> list[str]:
    """C compilers, best first; for another machine type than this one, Debian's cross compiler."""
    names: tuple[str, ...] = (f"{target_machine}-linux-gnu-gcc",)
    if target_machine in (machine(), ""):
        names = (environ["CC"],) if environ.get("CC") else _COMPILERS
    return [path for name in names if (path := shutil.which(name))]


def _is_disk_full(error: Exception) -> bool:
    numbers = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in numbers
    complaint: bytes = getattr(error, "stderr", None) or b""
    return any(os.strerror(number).encode() in complaint for number in numbers)


def _is_lasting(error: Exception) -> bool:
    """Whether the compiler would fail again. It need not if it was ended from outside, for example
    with the service that has started it; gcc and clang name the signal that ended their parts."""
    if not isinstance(error, subprocess.SubprocessError):
        return False
    status: int = getattr(error, "returncode", 0)
    complaint: bytes = getattr(error, "stderr", None) or b""
    return -status not in _ENDING and b"Terminated" not in complaint


def _reason(compiler: str, error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    lines = stderr.decode(errors="replace").strip().splitlines() if stderr else []
    # Before the error, compilers list the files that include its place.
    telling = next((line for line in lines if "error" in line), lines[0] if lines else error)
    return f"{compiler}: {telling}"
