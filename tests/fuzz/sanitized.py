"""The CPU kernels with address and undefined-behaviour sanitizers, in processes that preload them.

Loaded with `pytest -p tests.fuzz.sanitized`, or imported, this makes the process use the
instrumented library that `CARAVAN_SANITIZED_KERNELS` names.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from model_zoo.gguf import reader
from runtime.kernels import native

KERNELS = "CARAVAN_SANITIZED_KERNELS"
FLAGS = (
    *("-O1" if flag == "-O3" else flag for flag in native.FLAGS),
    *("-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)
# Python and torch never free all that they allocate, and ask for more than there is in tests of
# what happens then.
_ADDRESS = "detect_leaks=0:allocator_may_return_null=1:alloc_dealloc_mismatch=0:abort_on_error=1"
_UNDEFINED = "print_stacktrace=1:halt_on_error=1:abort_on_error=1"


def build(folder: Path) -> Path:
    """The instrumented library; NativeUnavailableError without a compiler."""
    return native.build(flags=FLAGS, directory=folder)


def environment(kernels: Path) -> dict[str, str]:
    """What a process needs that uses it: the sanitizers must be there before any other library."""
    libraries = [_library(name) for name in ("libasan.so", "libubsan.so")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": _ADDRESS,
        "UBSAN_OPTIONS": _UNDEFINED,
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        KERNELS: str(kernels),
    }


def _library(name: str) -> str:
    done = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, check=True, text=True
    )
    return done.stdout.strip()


def use(kernels: Path) -> None:
    """Make this process use the instrumented library, and own a copy of each weight.

    A kernel that reads beyond a weight in a map would find the next one, which is no error.
    """
    native.build = lambda **_: kernels  # type: ignore[assignment]
    view, spaced = reader._Part.view, reader._Part.spaced

    def copied_view(self, *args):
        weight = view(self, *args)
        return replace(weight, data=weight.data.clone())

    def copied_spaced(self, *args):
        weight = spaced(self, *args)
        return weight and replace(weight, data=weight.data.contiguous().clone())

    reader._Part.view, reader._Part.spaced = copied_view, copied_spaced  # type: ignore[method-assign]


if KERNELS in os.environ:
    os.environ.pop("LD_PRELOAD", None)  # processes that this one starts are not looked at
    use(Path(os.environ[KERNELS]))
