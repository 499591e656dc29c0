"""Launches of Triton kernels, which compute on CUDA devices what their torch twins specify.

The modules beside this one are imported where there is such a device only: a process that computes
on a CPU does not load Triton.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

# The first capability with bfloat16 in tensor cores and asynchronous copies to shared memory.
LEAST_CAPABILITY = (8, 0)
# The first capability whose tensor cores read operands from shared memory, which frees registers.
HOPPER = (9, 0)
BLACKWELL = (10, 0)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels compute for this device; else the torch twins do."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return capability(device) >= LEAST_CAPABILITY


def divided(number: int, by: int) -> int:
    """The quotient, rounded up. Triton's own function takes microseconds, for each launch."""
    return -(-number // by)


def next_power(number: int) -> int:
    """The smallest power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; for Triton's interpreter on a CPU that of an H100."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: object, device: torch.device, **options: object
) -> None:
    """Start `kernel[grid](*arguments, **options)` on `device`, whichever is the current one.

    Every launch goes through this function. An empty grid launches nothing.
    """
    if not all(grid):
        return
    if device.type == "cuda":
        with torch.cuda.device(device):
            start(kernel, grid, arguments, options)
    else:  # Triton's interpreter, in tests
        start(kernel, grid, arguments, options)


def start(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    """Launch on the current device. Tests replace this function to count launches."""
    kernel[grid](*arguments, **options)
