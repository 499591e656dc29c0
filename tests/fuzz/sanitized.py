"""Builds the CPU kernels with address and undefined-behaviour sanitizers, and uses them.

Importing this module, or `pytest -p tests.fuzz.sanitized`, makes the process use the instrumented
library that `CARAVAN_SANITIZED_KERNELS` names; the process must preload the sanitizers.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from model_zoo.gguf.mapped import MappedBytes
from runtime.kernels import build as kernels_build
from runtime.kernels import native

KERNELS = "CARAVAN_SANITIZED_KERNELS"
FLAGS = (
    *("-O1" if flag == "-O3" else flag for flag in kernels_build.FLAGS),
    *("-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)
# Python and torch leak at exit, and some tests allocate more memory than there is on purpose.
_ADDRESS = "detect_leaks=0:allocator_may_return_null=1:alloc_dealloc_mismatch=0:abort_on_error=1"
_UNDEFINED = "print_stacktrace=1:halt_on_error=1:abort_on_error=1"


def build(folder: Path) -> Path:
    """Compiles the instrumented library; raises NativeUnavailableError without a compiler."""
    return kernels_build.built_library(flags=FLAGS, directory=folder)


def environment(kernels: Path) -> dict[str, str]:
    """Environment of a process that uses it: sanitizers must load before all other libraries."""
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
    """Makes this process use the instrumented library and copy each weight.

    A read beyond a weight of a mapped file would hit the next weight, which no sanitizer detects.
    """
    native.built_library = lambda **_: kernels
    view, spaced = MappedBytes.view, MappedBytes.spaced

    def copied_view(self, *args):
        weight = view(self, *args)
        return replace(weight, data=weight.data.clone())

    def copied_spaced(self, *args):
        weight = spaced(self, *args)
        return weight and replace(weight, data=weight.data.contiguous().clone())

    MappedBytes.view, MappedBytes.spaced = copied_view, copied_spaced  # type: ignore[method-assign]


if KERNELS in os.environ:
    os.environ.pop("LD_PRELOAD", None)  # child processes run without sanitizers
    use(Path(os.environ[KERNELS]))
