"""Describes the machine and the versions with which figures were measured."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "ray", "llama-cpp-python", "gguf", "numpy")


def describe_machine(threads: int) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    load = os.getloadavg()[0]
    return "\n".join(
        [
            f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            f"- {describe_processor()}; instruction sets among others: {_instruction_sets()}",
            f"- memory: {_memory_gib():.0f} GiB",
            f"- threads for every engine: {threads}",
            f"- load average when it began: {load:.1f} (0 is an idle machine)",
            f"- Python {platform.python_version()}, {versions}",
        ]
    )


def describe_processor() -> str:
    return f"processor: {_field('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores"


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
