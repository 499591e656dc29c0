"""Compiles the CPU kernels: one library for each instruction set, into wheels or into a cache.

The name of a library has its instruction set and a digest of sources and options, so a library in
a wheel and one that this machine has compiled are found in the same way.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.kernels.levels import LEVELS, Level, machine, usable_levels

_log = logging.getLogger(__name__)

PREBUILT = Path(__file__).parent / "prebuilt"
WANTED = "CARAVAN_BUILD_KERNELS"  # the environment variable with the levels of a wheel
_SOURCES = Path(__file__).parent / "cpu"
_COMPILERS = ("gcc", "cc", "clang")
# Without contraction, all code paths round sums in the same way; see matmul.c.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fopenmp", "-fPIC", "-fvisibility=hidden",
         "-Wno-psabi")  # fmt: skip
_COMPILE_TIMEOUT_S = 3600  # for a compiler that hangs


class NativeUnavailableError(Exception):
    """There are no native kernels on this machine; the message has the reason."""


def built_library(
    *, flags: Sequence[str] = FLAGS, directory: Path | None = None, level: Level | None = None
) -> Path:
    """The library of the best instruction set (or of `level`), compiled into `directory` unless it
    is there or among the prebuilt ones. Raises NativeUnavailableError, and ConfigurationError as
    `usable_levels` does."""
    directory = directory or _writable(cache_directory(os.environ))
    reasons = []
    for each in usable_levels(os.environ) if level is None else (level,):
        if found := _find(each, flags, directory):
            return found
        for compiler in _available_compilers(os.environ, each.machine):
            try:
                return compile_library(compiler, each, flags, directory)
            except (OSError, subprocess.SubprocessError) as error:
                reasons.append(_reason(compiler, error))
    raise NativeUnavailableError("; ".join(reasons) or "there is no C compiler (gcc, cc or clang)")


def would_compile() -> bool:
    """Whether `built_library` would compile, which takes 10 to 40 seconds of processor time."""
    best = usable_levels(os.environ)[0]
    if _find(best, FLAGS, cache_directory(os.environ)):
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
    """`$CARAVAN_CACHE`, else the user's cache directory."""
    if chosen := environ.get("CARAVAN_CACHE"):
        return Path(chosen)
    if standard := environ.get("XDG_CACHE_HOME"):
        return Path(standard) / "caravan"
    return Path(os.path.expanduser("~")) / ".cache" / "caravan"


def compile_library(compiler: str, level: Level, flags: Sequence[str], directory: Path) -> Path:
    """Compile all sources in parallel, each in its own process.

    Built in a temporary folder and renamed, so that several processes may compile concurrently.
    """
    target = directory / _file_name(level, flags)
    options = [*flags, *level.flags, f'-DCARAVAN_LEVEL="{level.name}"']
    _log.info("Compiling the CPU kernels for %s with %s into %s.", level.name, compiler, directory)
    started = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sorted(_SOURCES.glob("*.c"))]
        running = [
            subprocess.Popen(
                [compiler, *options, "-c", str(_SOURCES / f"{o.stem}.c"), "-o", str(o)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
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
        # Linked without -fopenmp: the OpenMP functions come from the runtime that torch loaded.
        built = Path(folder) / "kernels.so"
        command = [compiler, "-shared", *map(str, objects), "-lm", "-o", str(built)]
        subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S)
        os.replace(built, target)
    _log.info("Compiled the CPU kernels in %.1f s.", time.monotonic() - started)
    return target


def _find(level: Level, flags: Sequence[str], directory: Path) -> Path | None:
    name = _file_name(level, flags)
    return next((path for path in (PREBUILT / name, directory / name) if path.exists()), None)


def _file_name(level: Level, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (*flags, *level.flags):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"kernels-{level.name}-{digest.hexdigest()[:24]}.so"


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


def _writable(directory: Path) -> Path:
    """The directory, or a private temporary one if it is not writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return Path(tempfile.mkdtemp(prefix="caravan-"))


def _reason(compiler: str, error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    lines = stderr.decode(errors="replace").strip().splitlines() if stderr else []
    # Before the error, compilers list the files that include its place.
    telling = next((line for line in lines if "error" in line), lines[0] if lines else error)
    return f"{compiler}: {telling}"
