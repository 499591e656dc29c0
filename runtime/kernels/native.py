"""The CPU kernels: C, compiled once for this machine.

`python -m runtime.kernels.native` compiles them before their first use.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from runtime.quant.formats.grids import all_grids

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "cpu"
_COMPILERS = ("gcc", "cc", "clang")
# Without contraction, all code paths round sums in the same way; see matmul.c.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=off", "-fopenmp", "-fPIC",
          "-fvisibility=hidden", "-Wno-psabi")  # fmt: skip
_COMPILE_TIMEOUT_S = 3600  # for a compiler that hangs

_pointer, _int, _int64, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "caravan_set_grids": ([_pointer], None),
    "caravan_matmul_knows": ([_int], _int),
    "caravan_has_integers": ([], _int),
    "caravan_packed_bytes": ([_int, _int], _int64),
    "caravan_matmul": ([_pointer, _int], None),
    "caravan_experts_places": ([_int, _int], _int64),
    "caravan_experts": ([_pointer, _int], _int),
    "caravan_weighted_sum": ([_pointer, _pointer, *3 * [_int], _pointer, _int], None),
    "caravan_clamped_swiglu": (
        [_pointer, _pointer, _float, _float, _int64, _pointer, _int],
        None,
    ),
    "caravan_attention_scratch": ([_pointer], _int64),
    "caravan_attention": ([_pointer, _pointer, _pointer, _int], None),
    "caravan_delta_scratch": ([_pointer], _int64),
    "caravan_delta": ([_pointer, _pointer, _int], None),
    "caravan_short_convolution": ([*6 * [_pointer], *3 * [_int], _pointer, _pointer, _int], None),
    "caravan_rms_norm": ([_pointer, _pointer, _float, _int, _int, _pointer, _int], None),
    "caravan_layer_norm": ([*3 * [_pointer], _float, _int, _int, _pointer, _int], None),
    "caravan_rope": ([*3 * [_pointer], *5 * [_int], _pointer, _int], None),
    "caravan_gate": ([_int, _pointer, _pointer, _int64, _pointer, _int], None),
    "caravan_explain_bus_errors": ([], None),
    "caravan_softcap": ([_pointer, _int64, _float, _pointer, _int], None),
}


class NativeUnavailableError(Exception):
    """There are no native kernels on this machine; the message has the reason."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, after one warning, if callers must use the torch twins."""
    try:
        return load(build())
    except NativeUnavailableError as error:
        _log.warning("CPU kernels are not available, using slow torch code instead: %s", error)
        return None


def has_integer_products() -> bool:
    """Whether products are computed otherwise than exactly where `Weight.compute` allows it."""
    kernels = library()
    return kernels is not None and bool(kernels.caravan_has_integers())


def explain_bus_errors() -> None:
    """Make a bus error (SIGBUS) print the mapped file that caused it to standard error.

    The process still ends. Without native kernels this does nothing.
    """
    kernels = library()
    if kernels is not None:
        kernels.caravan_explain_bus_errors()


def needs_compiling() -> bool:
    """Whether `library` would compile, which takes 10 to 40 seconds of processor time."""
    if library.cache_info().currsize:
        return False
    directory = cache_directory(os.environ)
    try:
        compilers = _available_compilers(os.environ)
        targets = [_target(directory, compiler, FLAGS) for compiler in compilers]
    except (OSError, subprocess.SubprocessError):
        return True
    return bool(targets) and not any(target.exists() for target in targets)


def address(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """The address of the first element. ValueError unless the tensor has this shape and type, is
    contiguous and on the CPU: kernels do not check their pointers.
    """
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"a kernel takes {dtype} {list(shape)} here, not {tensor.dtype} {list(tensor.shape)}"
        )
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a kernel takes a contiguous tensor on the CPU, not one on {tensor.device} with "
            f"strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def row_address(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """As `address`, for tensors with contiguous rows and any stride between rows."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"a kernel takes contiguous rows, not strides {tensor.stride()}")
    if tensor.shape != tuple(shape) or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"a kernel takes {dtype} {list(shape)} on the CPU here, not {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )
    return tensor.data_ptr()


def build(*, flags: Sequence[str] = FLAGS, directory: Path | None = None) -> Path:
    """Compile the sources, unless a library of this compiler, source, flags and CPU exists."""
    directory = directory or _writable(cache_directory(os.environ))
    reasons = []
    for compiler in _available_compilers(os.environ):
        try:
            target = _target(directory, compiler, flags)
            if not target.exists():
                _compile(compiler, flags, target)
            return target
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(_reason(compiler, error))
    raise NativeUnavailableError("; ".join(reasons) or "there is no C compiler (gcc, cc or clang)")


def load(path: Path) -> ctypes.CDLL:
    """Load a library with torch's OpenMP runtime, so that both use one thread pool."""
    try:
        ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
        kernels = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(str(error)) from error
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, result
    grids = all_grids()  # a variable, so that it exists until it is copied
    kernels.caravan_set_grids(address(grids, grids.shape, grids.dtype))
    return kernels


def cache_directory(environ: Mapping[str, str]) -> Path:
    """`$CARAVAN_CACHE`, else the user's cache directory."""
    if chosen := environ.get("CARAVAN_CACHE"):
        return Path(chosen)
    if standard := environ.get("XDG_CACHE_HOME"):
        return Path(standard) / "caravan"
    return Path(os.path.expanduser("~")) / ".cache" / "caravan"


def _writable(directory: Path) -> Path:
    """The directory, or a private temporary one if it is not writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return Path(tempfile.mkdtemp(prefix="caravan-"))


def _available_compilers(environ: Mapping[str, str]) -> list[str]:
    names = (environ["CC"],) if environ.get("CC") else _COMPILERS
    return [path for name in names if (path := shutil.which(name))]


def _target(directory: Path, compiler: str, flags: Sequence[str]) -> Path:
    return directory / f"kernels-{_fingerprint(compiler, flags)}.so"


def _fingerprint(compiler: str, flags: Sequence[str]) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S
    )
    digest = hashlib.sha256(version.stdout)
    for part in (*flags, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """The processor model and features, which `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    """Compile all sources in parallel, each in its own process.

    Built in a temporary folder and renamed, so that several processes may compile concurrently.
    """
    _log.info("Compiling the CPU kernels with %s into %s.", compiler, target.parent)
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sorted(_SOURCES.glob("*.c"))]
        running = [
            subprocess.Popen(
                [compiler, *flags, "-c", str(_SOURCES / f"{o.stem}.c"), "-o", str(o)],
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


def _reason(compiler: str, error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    lines = stderr.decode(errors="replace").strip().splitlines() if stderr else []
    return f"{compiler}: {lines[0] if lines else error}"


def _openmp_runtime() -> str:
    """The OpenMP library in this process, which is torch's."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        maps = []
    mapped = {line.split()[-1] for line in maps if "/" in line}
    beside_torch = map(str, (Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for path in (*sorted(mapped), *beside_torch):
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            return path
    raise NativeUnavailableError("torch runs without an OpenMP library")


def main() -> None:
    """Compile the kernels if necessary; without a compiler, log the reason."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    library()


if __name__ == "__main__":
    main()
