"""Launches of Triton kernels, which compute on CUDA devices what their torch twins specify.

The modules beside this one are imported where there is such a device only: a process that computes
on a CPU does not load Triton.
"""

import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from runtime.errors import ConfigurationError

# The first capability with bfloat16 in tensor cores and asynchronous copies to shared memory.
LEAST_CAPABILITY = (8, 0)
# The first capability whose tensor cores read operands from shared memory, which frees registers.
HOPPER = (9, 0)
BLACKWELL = (10, 0)
_GEFORCE_BLACKWELL, _ADA = (12, 0), (8, 9)
# What Triton has compiled, and constants of the kernel, by all that they depend on.
_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels compute for this device; else the torch twins do."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return capability(device) >= LEAST_CAPABILITY


def prepare_launches() -> None:
    """Have Triton compile the C code by which it starts kernels, unless its cache has it.

    Raises ConfigurationError if that is not possible.
    """
    from triton.runtime import driver

    try:
        driver.active  # noqa: B018  # which is made at first use
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"Triton cannot compile the code that starts kernels on CUDA devices: {error} Install "
            "gcc and the headers of Python (Debian: gcc, python3-dev), or set `device: cpu`."
        ) from error


def divided(number: int, by: int) -> int:
    """The quotient, rounded up. Triton's own function takes microseconds, for each launch."""
    return -(-number // by)


def with_adjacent_elements(x: Tensor) -> Tensor:
    """x, or a copy if the elements of its rows are not adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


def next_power(number: int) -> int:
    """The smallest power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; for Triton's interpreter on a CPU that of an H100."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER


def tensor_cores_of(capability: tuple[int, int]) -> tuple[int, int]:
    """The capability whose tensor cores and shared memory a device has: of 8.9 from 12.0 on, which
    are devices of GeForce and of workstations."""
    return _ADA if capability >= _GEFORCE_BLACKWELL else capability


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: object,
    device: torch.device,
    overlaps: bool = False,
    **options: object,
) -> None:
    """Start `kernel[grid](*arguments, **options)` on `device`, whichever is the current one.

    Every launch goes through this function. An empty grid launches nothing. `overlaps`: the kernel
    may begin while the previous one ends, as described in `overlap.py`.
    """
    if not all(grid):
        return
    if overlaps and device.type == "cuda" and capability(device) >= HOPPER:
        options["launch_pdl"] = True
    # Triton's interpreter, in tests, computes on a CPU.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        start(kernel, grid, arguments, options, device)
    else:
        with torch.cuda.device(device):
            start(kernel, grid, arguments, options, device)


def start(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[object, ...],
    options: dict[str, object],
    device: torch.device,
) -> None:
    """Launch on the current device. Tests replace this function to count launches.

    Triton takes three times as long to find what it has compiled.
    """
    key = kernel.fn, device, *options.items(), *specialization(arguments)
    known = _compiled.get(key)
    if known is not None:
        compiled, constants = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, **options)
    if compiled is not None:  # as the interpreter returns
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, tuple(options[name] for name in names)


def specialization(arguments: Iterable[Any]) -> tuple[object, ...]:
    """Differs if Triton compiles a kernel anew for arguments: for each type of numbers and of
    elements, for 1, and for addresses and integers that are divisible by 16 or not."""
    found: list[object] = []
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            long = (argument if argument >= 0 else ~argument).bit_length() // 32
            found.append((argument == 1) + 2 * (argument & 15 == 0) + 4 * long)
        elif argument is None:
            found.append(None)
        elif isinstance(argument, Tensor):
            found.append(argument.dtype)
            found.append(argument.data_ptr() & 15 == 0)
        else:
            found.append(kind)
    return tuple(found)
