"""The device, threads and dtypes of this process, and the log of loading progress."""

import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from model_zoo.gguf.tiled_copy import TilingOptions
from runtime.engine.memory_plan import available_bytes
from runtime.errors import ConfigurationError
from runtime.host_limits import usable_cpus
from runtime.kernels import native
from runtime.kernels.build import cache_directory
from runtime.kernels.cpu_levels import levels_of, machine, processor_features
from runtime.kernels.triton.launch import has_kernels, prepare_launches
from runtime.kv.cache_types import CacheType, default_cache_type
from runtime.quant.weight import Compute
from serve_app.logs import get_logger

PROGRESS_LOG_S = 1.0
# Ray writes the GPUs that it reserves for a process into this variable.
_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NO_GPUS = ("", "-1", "NoDevFiles")

log = get_logger()


def computing_device(kind: str, threads: int | None, *, main_gpu: int = 0) -> torch.device:
    """The device, set up for computing. `main_gpu`: index among this process's GPUs."""
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise ConfigurationError(
            "`device` is cuda, but this process has no CUDA device. Set `num_gpus` or choose cpu."
        )
    kind = kind if kind != "auto" else "cuda" if available else "cpu"
    # Ray sets OpenMP to one thread. Beside a GPU, layers that do not fit there need them too.
    torch.set_num_threads(threads or usable_cpus())
    if kind == "cpu":
        prepare_kernels()
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if main_gpu >= count:
        raise ConfigurationError(
            f"`main_gpu` is {main_gpu}, but this process has {count} GPUs, numbered from 0."
        )
    device = torch.device("cuda", main_gpu)
    if has_kernels(device):
        prepare_launches()
    return device


def prepare_kernels() -> None:
    """Compiles the CPU kernels unless this machine has them, and logs how long that takes."""
    if not native.needs_compiling():
        return
    log.info("compiling kernels", what="CPU kernels, once per instruction set and version")
    begun = time.monotonic()
    if native.library() is not None:
        log.info("kernels compiled", compile_s=round(time.monotonic() - begun, 3))


def share_threads(threads: int | None, processes: int) -> None:
    """Divides this machine's processors among `processes`, unless `threads` is configured."""
    if threads is None:
        torch.set_num_threads(max(1, usable_cpus() // processes))


def number_type(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def compute_type(name: str) -> Compute:
    """How activations enter products on a CPU."""
    if name not in ("auto", "exact") and not native.has_integer_products():
        log.warning("computed exactly: no integer products on this processor", compute=name)
    return Compute[name.upper()]


def tiling_options(repack: str) -> TilingOptions | None:
    """Where copies of weights in tiles are kept; None if `repack` is off."""
    return None if repack == "off" else TilingOptions(cache_directory(os.environ) / "tiles")


def require_cache_type(name: str, device: torch.device) -> None:
    """ConfigurationError if no kernel of the device reads a cache of this type."""
    if name == CacheType.FP8.value and not has_kernels(device):
        raise ConfigurationError(
            f"`kv_dtype` is fp8, but some layers are computed on {device}; fp8 needs CUDA devices "
            "of compute capability 8.0 or later. Choose q8_0, which takes 6 % more memory."
        )


def require_deterministic(device: torch.device, ranks: int) -> None:
    """ConfigurationError if the device's results for a row may depend on other rows."""
    if device.type == "cpu":
        return
    if not has_kernels(device):
        raise ConfigurationError(
            f"`deterministic` is true, which {device} cannot compute; it needs Triton and compute "
            "capability 8.0 or later. Remove it."
        )
    if ranks > 2:
        raise ConfigurationError(
            f"`deterministic` is true, and `parallel.tensor` is {ranks}: NCCL adds the parts of "
            "more than two ranks in an order that depends on the number of rows. Lower it to 2."
        )


def cache_type(name: str, device: torch.device, *, generates: bool) -> CacheType:
    """The type of the cache. `generates`: whether the model generates text."""
    return CacheType(name) if name != "auto" else default_cache_type(device, generates=generates)


class LoadingProgress:
    """Logs the progress of loading at intervals and at its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now < self._due and done_bytes < total_bytes:
            return
        self._due = now + PROGRESS_LOG_S
        percent = round(100 * done_bytes / max(1, total_bytes))
        log.info(
            "loading", model=self._name, percent=percent, bytes=done_bytes, total_bytes=total_bytes
        )


def log_devices(device: torch.device, *, kind: str) -> None:
    """Logs the devices of this process in order, `device` as the main one, and the versions of the
    libraries that compute, read files and apply grammars. `kind`: the configured `device`; a CPU in
    place of a GPU that the process was given is a warning."""
    packages = ["torch", "llguidance", "gguf"]
    gpus = os.environ.get(_GPUS_VARIABLE, "")
    if kind == "auto" and device.type == "cpu" and gpus not in _NO_GPUS:
        log.warning(
            "computed on the CPU: torch cannot use the GPU of this process",
            gpus=gpus,
            reason=_cuda_error(),
            host=os.uname().nodename,
        )
    if device.type == "cuda":
        packages.append("triton")
        for index in range(torch.cuda.device_count()):
            _log_gpu(index, main=index == device.index)
    else:
        _log_processor()
    log.info("versions", **{name: _version(name) for name in packages})


def _cuda_error() -> str:
    """Why torch does not use CUDA: the first line of its message."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return "torch finds no device"


def _log_gpu(index: int, *, main: bool) -> None:
    """Free memory is logged for the main device only, because reading it takes memory of a
    device."""
    facts = torch.cuda.get_device_properties(index)
    free = {"free_bytes": torch.cuda.mem_get_info(index)[0]} if main else {}
    log.info(
        "device",
        index=index,
        kind="cuda",
        name=facts.name,
        main=main,
        total_bytes=facts.total_memory,
        **free,
        compute_capability=f"{facts.major}.{facts.minor}",
        kernels="triton" if has_kernels(torch.device("cuda", index)) else "torch",
    )


def _log_processor() -> None:
    """Logs the processor. `kernels`: the instruction set of the kernels in use, one of
    `instruction_sets` or "torch"."""
    log.info(
        "device",
        index=0,
        kind="cpu",
        name=processor_name(),
        free_bytes=available_bytes(torch.device("cpu")),
        total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cpus=os.cpu_count(),
        threads=torch.get_num_threads(),
        instruction_sets=[level.name for level in levels_of(machine(), processor_features())],
        kernels=native.kernel_level(),
    )


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Linux's name of the first processor; its architecture if Linux has no name."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, machine())


def _version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
