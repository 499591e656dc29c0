"""Describes the machine and the versions with which figures were measured."""

import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from runtime.kernels.cpu_levels import Level, usable_levels

PACKAGES = ("torch", "ray", "llama-cpp-python", "gguf", "numpy")
# Features of processors as Linux names them, and as llama.cpp does.
_OF_PEER = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_tile": "AMX_INT8",
}


def describe_machine(threads: int | None = None, packages: Sequence[str] = PACKAGES) -> str:
    """Lines for the head of a section; call it before anything is measured. `threads`: those of
    every engine; `packages`: those whose versions matter."""
    processor = f"{_field('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores"
    versions = [f"Python {platform.python_version()}", *(f"{n} {version(n)}" for n in packages)]
    lines = [
        f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"- processor: {processor}; instruction sets among others: {_instruction_sets()}",
        f"- memory: {_memory_gib():.0f} GiB",
        *([] if threads is None else [f"- threads for every engine: {threads}"]),
        f"- load average when it began: {os.getloadavg()[0]:.1f} (0 is an idle machine)",
        f"- {', '.join(versions)}",
    ]
    return "\n".join(lines)


def describe_peer(system_info: str) -> str:
    """The line about llama.cpp's build. `system_info`: what llama.cpp itself says of it.
    SystemExit if it lacks what this engine uses, for example because its wheel is from another
    machine."""
    check_peer(system_info, usable_levels(os.environ)[0])
    return f"- llama.cpp: {system_info.strip(' |')}"


def check_peer(system_info: str, level: Level) -> None:
    """SystemExit if this build of llama.cpp lacks a feature of the level of this engine's
    kernels."""
    features = {name for name, value in re.findall(r"(\w+) = (\d+)", system_info) if value != "0"}
    wanted = (_OF_PEER[feature] for feature in level.features if feature in _OF_PEER)
    if missing := sorted(set(wanted) - features):
        raise SystemExit(
            f"llama.cpp was compiled without {', '.join(missing)}, which this engine uses: "
            f"{system_info.strip()}\nUninstall llama-cpp-python, remove .venv/installed-bench, and "
            "run `make bench` again, or restrict this engine too, with CARAVAN_KERNELS."
        )


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _instruction_sets() -> str:
    flags = set(_field("/proc/cpuinfo", "flags").split())
    telling = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return ", ".join(flag for flag in telling if flag in flags) or "none of the usual"


def _memory_gib() -> float:
    return int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20
