"""The device, threads and number types of this process, and how far loading onto it is."""

import os
import time
from pathlib import Path

import torch

from runtime.errors import ConfigurationError
from runtime.kernels import native
from serve_app.logs import get_logger

PROGRESS_EVERY_S = 1.0

log = get_logger()


def computing_device(kind: str, threads: int | None, *, main_gpu: int = 0) -> torch.device:
    """Ready to compute. `main_gpu`: which of this process's GPUs, where it has several."""
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise ConfigurationError("`device` is cuda, but this process sees no CUDA device.")
    kind = kind if kind != "auto" else "cuda" if available else "cpu"
    if kind == "cpu":
        # Ray pins OpenMP to one thread unless told otherwise.
        torch.set_num_threads(threads or usable_cpus())
        prepare_kernels()
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if main_gpu >= count:
        raise ConfigurationError(
            f"`main_gpu` is {main_gpu}, but this process has {count} GPUs, counted from 0."
        )
    return torch.device("cuda", main_gpu)


def prepare_kernels() -> None:
    """Compile the CPU kernels where they are new to this machine, and log how long that takes."""
    if not native.needs_compiling():
        return
    log.info("compiling kernels", what="CPU kernels, once for this processor and their version")
    begun = time.monotonic()
    if native.library() is not None:
        log.info("kernels compiled", compile_s=round(time.monotonic() - begun, 3))


def share_threads(threads: int | None, processes: int) -> None:
    """So many processes compute on this machine's processors, each with `threads` if given."""
    if threads is None:
        torch.set_num_threads(max(1, usable_cpus() // processes))


def usable_cpus(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The processors that this process may run on, within its container's quota of time."""
    allowed = len(os.sched_getaffinity(0))
    if not quota_file.is_file():
        return allowed
    quota, _, period = quota_file.read_text().partition(" ")
    return min(allowed, max(1, int(quota) // int(period))) if quota.isdigit() else allowed


def number_type(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


class LoadingProgress:
    """Says how far loading is, now and then, and when it is done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now < self._due and done_bytes < total_bytes:
            return
        self._due = now + PROGRESS_EVERY_S
        percent = round(100 * done_bytes / max(1, total_bytes))
        log.info(
            "loading", model=self._name, percent=percent, bytes=done_bytes, total_bytes=total_bytes
        )


def log_device(device: torch.device) -> None:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        log.info("device", kind="cuda", name=name, free_bytes=free, total_bytes=total)
    else:
        log.info("device", kind="cpu", cpus=os.cpu_count(), threads=torch.get_num_threads())
