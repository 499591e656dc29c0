"""The instruction sets that CPU kernels are compiled for, and which of them a processor has."""

import ctypes
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from runtime.errors import ConfigurationError

FORCED = "CARAVAN_KERNELS"  # the environment variable that names the level to use


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set: one library of kernels is compiled for each.

    `machine`: as Linux names it; "" for any. `features`: what the processor must have,
    as Linux names it in /proc/cpuinfo. `flags`: the compiler's options for it.
    """

    name: str
    machine: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


# Options whose names differ from those of Linux.
_OPTIONS = {
    "abm": "lzcnt",
    "avx_vnni": "avxvnni",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "bmi1": "bmi",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
}
_V3 = ("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe")
_BF16 = ("avx512_vnni", "avx512vbmi", "avx512_bf16")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


def _x86(name: str, *features: str) -> Level:
    # Each option by itself: compilers before gcc 11 and clang 12 do not know -march=x86-64-v3.
    options = (f"-m{_OPTIONS.get(feature, feature)}" for feature in features)
    return Level(name, "x86_64", features, ("-march=x86-64", *options))


# The best first.
LEVELS = (
    _x86("x86-64-v4-amx", *_V4, *_BF16, "amx_tile", "amx_bf16"),
    _x86("x86-64-v4-bf16", *_V4, *_BF16),
    _x86("x86-64-v4-vnni", *_V4, "avx512_vnni"),
    _x86("x86-64-v4", *_V4),
    _x86("x86-64-v3-vnni", *_V3, "avx_vnni"),
    _x86("x86-64-v3", *_V3),
    _x86("x86-64"),
    Level("arm64-dotprod", "aarch64", ("asimddp",), ("-march=armv8.2-a+dotprod",)),
    Level("arm64", "aarch64", (), ("-march=armv8-a",)),
)
_GENERIC = Level("generic", "", (), ())  # for other machines


def usable_levels(environ: Mapping[str, str]) -> tuple[Level, ...]:
    """The levels that this process can use, the best first; only the one that CARAVAN_KERNELS
    names, if it is set. Raises ConfigurationError if the processor does not have that one."""
    usable = levels_of(machine(), _permitted(processor_features()))
    name = environ.get(FORCED)
    if not name:
        return usable
    forced = tuple(level for level in usable if level.name == name)
    if not forced:
        known = ", ".join(level.name for level in usable)
        raise ConfigurationError(f"`{FORCED}` is {name!r}; this processor has {known}.")
    return forced


def levels_of(machine: str, features: Iterable[str]) -> tuple[Level, ...]:
    """The levels that such a processor has, the best first."""
    present = set(features)
    usable = (level for level in LEVELS if present.issuperset(level.features))
    return tuple(level for level in usable if level.machine == machine) or (_GENERIC,)


def _permitted(features: frozenset[str]) -> frozenset[str]:
    """Without those of AMX if Linux does not let this process use its registers."""
    amx = {feature for feature in features if feature.startswith("amx_")}
    return features - amx if amx and not _amx_is_permitted() else features


@cache
def _amx_is_permitted() -> bool:
    """Requests the permission for this process, its threads and its later child processes.

    Source: Documentation/arch/x86/xstate.rst of Linux.
    """
    request_permission, tile_data = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    arch_prctl = 158
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def machine() -> str:
    """Of this processor, as Linux names it."""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name := platform.machine(), name)


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Of the first processor; none where there is no such file."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
