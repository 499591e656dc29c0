"""The kernels of arm64 in this process, under qemu-user.

They run in another process on the memory of this one; see driver.c. Needs Debian's packages
gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
"""

import ctypes
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.kernels.build import built_library
from runtime.kernels.cpu_levels import Level
from runtime.kernels.native import SIGNATURES
from runtime.quant.formats.grids import all_grids

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_SYSROOT = "/usr/aarch64-linux-gnu"
_CALL = struct.Struct("64s16q4f")
_INTEGERS = (ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)


@contextmanager
def emulated(level: Level) -> Iterator["EmulatedLibrary"]:
    """The kernels of an instruction set of arm64, compiled if they are not in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [EMULATOR, "-L", _SYSROOT, str(_driver(Path(folder)))]
        command += [str(built_library(level=level)), f"/proc/{os.getpid()}/mem"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            kernels = EmulatedLibrary(process, level)
            grids = all_grids()
            kernels.caravan_set_grids(grids.data_ptr())
            yield kernels


class EmulatedLibrary:
    """The kernels as attributes, as of a `ctypes.CDLL`. They must be called with one thread."""

    def __init__(self, process: subprocess.Popen, level: Level) -> None:
        self._process, self._level = process, level

    def caravan_level(self) -> bytes:
        """The function of this name returns an address in the other process."""
        return self._level.name.encode()

    def __getattr__(self, name: str) -> Any:
        arguments, result = SIGNATURES[name]

        def function(*given: Any) -> int | None:
            assert len(given) == len(arguments), name
            pairs = list(zip(arguments, given, strict=True))
            whole = [_integer(value) for kind, value in pairs if kind in _INTEGERS]
            reals = [value for kind, value in pairs if kind is ctypes.c_float]
            assert len(whole) + len(reals) == len(given), name
            answer = self._call(name, whole, reals)
            return None if result is None else result(answer).value

        return function

    def _call(self, name: str, whole: list[int], reals: list[float]) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        padded = (*whole, *[0] * (16 - len(whole)), *reals, *[0.0] * (4 - len(reals)))
        stdin.write(_CALL.pack(name.encode(), *padded))
        stdin.flush()
        answer = stdout.read(8)
        assert len(answer) == 8, f"{name} ended the emulator with status {self._process.wait()}"
        return int.from_bytes(answer, "little", signed=True)


def _integer(value: Any) -> int:
    """An integer, an address, or the address of what `ctypes.byref` refers to."""
    if value is None:
        return 0
    return value if isinstance(value, int) else ctypes.addressof(value._obj)


def _driver(folder: Path) -> Path:
    """Linked with arm64's OpenMP, which the kernels use and which is torch's otherwise."""
    driver, source = folder / "driver", Path(__file__).with_name("driver.c")
    options = ("-O1", "-fopenmp", "-rdynamic", "-Wl,--no-as-needed", "-lgomp", "-ldl")
    subprocess.run([COMPILER, str(source), *options, "-o", str(driver)], check=True)
    return driver
