"""The OpenMP library with which torch computes; other packages may have brought further ones."""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

_NAMES = ("libgomp", "libiomp", "libomp")
_FUNCTION = "omp_set_num_threads"


@cache
def openmp() -> ctypes.CDLL | None:
    """The library, whose names are global from now on; None if torch computes without OpenMP.

    OSError if libraries cannot be loaded.
    """
    libraries = Path(torch.__file__).parent / "lib"
    wanted = _address(ctypes.CDLL(str(libraries / "libtorch_cpu.so")))
    for path in (*_mapped(), *map(str, libraries.glob("lib*omp*"))):
        if Path(path).name.startswith(_NAMES) and _address(ctypes.CDLL(path)) == wanted:
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return None


def use_one_thread() -> None:
    """Makes torch compute with one thread where the calling thread uses it, and only there.

    `torch.set_num_threads` would also change the count of all threads that first use torch later.
    """
    library = openmp()
    assert library is not None
    torch.get_num_threads()  # at its first use in a thread, torch sets OpenMP's count there
    library.omp_set_num_threads(1)


def _mapped() -> list[str]:
    """The paths of all files that this process maps."""
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    except OSError:
        maps = []
    return sorted({line.split()[-1] for line in maps if "/" in line})


def _address(library: ctypes.CDLL) -> int | None:
    """Of OpenMP's function as the library and those that it is linked with define it."""
    function = getattr(library, _FUNCTION, None)
    return ctypes.cast(function, ctypes.c_void_p).value if function is not None else None
