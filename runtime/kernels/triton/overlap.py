"""Programs of a launch begin while those of the previous one end (programmatic dependent launch).

Kernels launched with `overlaps` call `wait_for_previous`. Until it returns, a program may read what
no kernel writes, as weights, and writes nothing. Triton's interpreter and devices before Hopper run
launches one after the other.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from runtime.kernels.triton.words import ASSEMBLY


@triton.jit
def begin_next():
    """The next launch may begin once all programs of this one have called this or ended. Programs
    that wait occupy multiprocessors, so only short kernels call it early."""
    if ASSEMBLY and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Return when previous launches have ended and what they wrote can be read."""
    if ASSEMBLY and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
