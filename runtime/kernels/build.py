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
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.home_directory import expanded
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
# Libraries that no process has loaded for so long are removed after a compilation.
UNUSED_AGE_S = 7 * 24 * 3600.0


class NativeUnavailableError(Exception):
    """There are no native kernels on this machine; the message has the reason."""


def built_library(
    *, flags: Sequence[str] = FLAGS, directory: Path | None = None, level: Level | None = None
) -> Path:
    """The library of the best instruction set (or of `level`), from a wheel or as this machine has
    compiled it; otherwise it is compiled now. `directory`: the only place for compiled libraries,
    by default the cache, else a temporary folder. Raises NativeUnavailableError, and
    ConfigurationError as `usable_levels` does."""
    places = _places(os.environ) if directory is None else [_Place(directory)]
    usable, reasons = [*places], list[str]()
    for each in usable_levels(os.environ) if level is None else (level,):
        if found := _find(each, flags, places):
            with contextlib.suppress(OSError):  # it may belong to another user
                os.utime(found)  # by which `_remove_unused` finds that it is used
            return found
        for compiler in _available_compilers(os.environ, each.machine):
            if built := _compiled(compiler, each, flags, usable, reasons):
                return built
    raise NativeUnavailableError("; ".join(reasons) or "there is no C compiler (gcc, cc or clang)")


def would_compile() -> bool:
    """Whether `built_library` would compile, which takes 10 to 40 seconds of processor time."""
    best = usable_levels(os.environ)[0]
    if _find(best, FLAGS, _places(os.environ)):
        return False
    return bool(_available_compilers(os.environ, best.machine))


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
        running = [
            subprocess.Popen(
                [compiler, *options, "-c", str(_SOURCES / f"{o.stem}.c"), "-o", str(o)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
            )
            for o in objects
        ]
        try:
            for process in running:
                _, complaint = process.communicate(timeout=_COMPILE_TIMEOUT_S)
                if process.returncode:
                    raise subprocess.CalledProcessError(
                        process.returncode, process.args, stderr=complaint
                    )
        finally:
            for process in running:
                process.kill()
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
    compiler: str, level: Level, flags: Sequence[str], places: list[_Place], reasons: list[str]
) -> Path | None:
    """The library, compiled into the first of `places` with space for it; None with a reason more
    if that fails. Places that cannot be used or are full are removed from the list."""
    for place in [*places]:
        if obstacle := place.obstacle():
            reasons.append(obstacle)
        else:
            try:
                return compile_library(compiler, level, flags, place.folder)
            except (OSError, subprocess.SubprocessError) as error:
                reasons.append(_reason(compiler, error))
                if not _is_disk_full(error):
                    return None
        places.remove(place)
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


def _reason(compiler: str, error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    lines = stderr.decode(errors="replace").strip().splitlines() if stderr else []
    # Before the error, compilers list the files that include its place.
    telling = next((line for line in lines if "error" in line), lines[0] if lines else error)
    return f"{compiler}: {telling}"
