"""The CPU kernels: C, in a library for the best instruction set of this processor.

`python -m runtime.kernels.native` compiles them before their first use.
"""

import ctypes
import fcntl
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from runtime.kernels.build import (
    NativeUnavailableError,
    built_library,
    forget_failures,
    would_compile,
)
from runtime.kernels.openmp import openmp
from runtime.kernels.recording import recordable
from runtime.quant.formats.grids import all_grids

_log = logging.getLogger(__name__)

_pointer, _int, _int64, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "caravan_level": ([], ctypes.c_char_p),
    "caravan_set_grids": ([_pointer], None),
    "caravan_matmul_knows": ([_int, _int], _int),
    "caravan_has_integers": ([], _int),
    "caravan_tiled_type": ([_int, _int], _int),
    "caravan_packed_bytes": ([*4 * [_int]], _int64),
    "caravan_matmul": ([_pointer, _int], None),
    "caravan_experts_places": ([_int, _int], _int64),
    "caravan_experts": ([_pointer, _int], _int),
    "caravan_route": ([_pointer, _int], _int),
    "caravan_weighted_sum": ([*4 * [_pointer], *4 * [_int], _pointer, _int], _int),
    "caravan_clamped_swiglu": (
        [_pointer, _pointer, _float, _float, _int, _int64, _pointer, _int],
        None,
    ),
    "caravan_attention_scratch": ([_pointer], _int64),
    "caravan_attention": ([_pointer], None),
    "caravan_write_cache": ([_pointer], _int),
    "caravan_choice_scratch": ([_pointer], _int64),
    "caravan_choose_tokens": ([_pointer], None),
    "caravan_delta": ([_pointer, _int], None),
    "caravan_state_space": ([_pointer, _int], None),
    "caravan_selective_scan": ([_pointer, _int], None),
    "caravan_wkv7": ([_pointer, _int], None),
    "caravan_short_convolution": ([*6 * [_pointer], *3 * [_int], _pointer, _pointer, _int], None),
    "caravan_rms_norm": (
        [_pointer, _int64, _pointer, _int, _float, *3 * [_int], _pointer, _int],
        None,
    ),
    "caravan_layer_norm": (
        [_pointer, _int64, *2 * [_pointer], _int, _float, *3 * [_int], _pointer, _int],
        None,
    ),
    "caravan_rope": ([_pointer, _int64, *2 * [_pointer], *5 * [_int], _pointer, _int], None),
    "caravan_angles": (
        [*3 * [_pointer], *2 * [_int], _float, *2 * [_pointer], _int],
        None,
    ),
    "caravan_gate": (
        [_int, *2 * [_pointer, _int64], *2 * [_int64], _pointer, _int],
        None,
    ),
    "caravan_add": ([*2 * [_pointer, _int64], _float, *3 * [_int]], None),
    "caravan_clip": ([_pointer, _int64, _float, *3 * [_int]], None),
    "caravan_take_rows": ([_pointer, *2 * [_int64], _pointer, *2 * [_int], _pointer], _int),
    "caravan_temper": (
        [_pointer, _int64, _pointer, _int64, *2 * [_float], *2 * [_int], _pointer, _int],
        None,
    ),
    "caravan_copy": ([*2 * [_pointer, _int64, _int64], *3 * [_int]], None),
    "caravan_fill_columns": ([_pointer, _int64, *3 * [_int], _float], None),
    "caravan_fill_listed": (
        [_pointer, _int64, _int, _int64, _pointer, _int64, _float],
        _int,
    ),
    "caravan_embedding_knows": ([_int], _int),
    "caravan_embedding": (
        [_int, _pointer, *2 * [_int64], _pointer, *2 * [_int], _pointer],
        _int,
    ),
    "caravan_table_rows": ([_pointer, *3 * [_int64], _pointer], None),
    "caravan_token_columns": ([_pointer, _int64, _int, _pointer], None),
    "caravan_ngram_rows": (
        [*5 * [_pointer], _int64, *3 * [_int], _int64, _pointer],
        None,
    ),
    "caravan_draw": ([_pointer, _int], None),
    "caravan_forbid": (
        [_pointer, _int64, _int, _pointer, _int, _pointer, _int],
        _int,
    ),
    "caravan_slot_entries": (
        [_pointer, *2 * [_int64], *2 * [_pointer], *2 * [_int64], _pointer],
        _int,
    ),
    "caravan_replay": ([_pointer, _int64, _int], _int64),
    "caravan_explain_bus_errors": ([], None),
    "caravan_softcap": ([_pointer, _int64, _float, _pointer, _int], None),
    "caravan_xielu": ([_pointer, _int64, *4 * [_float], _pointer, _int], None),
    "caravan_mix_streams": ([*2 * [_pointer], *3 * [_int], _pointer, _int], None),
    "caravan_correct_streams": ([*2 * [_pointer], _int64, _pointer, *5 * [_int]], None),
    "caravan_add_shares": ([*2 * [_pointer], _int64, _pointer, *4 * [_int]], None),
    "caravan_gate_streams": ([*3 * [_pointer], _float, *3 * [_int], _pointer, _int], None),
    "caravan_match_rms": ([*2 * [_pointer, _int64], _float, *3 * [_int]], None),
    "caravan_cut_low": ([_pointer, _int64, _float, *2 * [_int], _pointer, _int], None),
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, after one warning, if callers must use the torch twins.

    Raises ConfigurationError if CARAVAN_KERNELS names a level that this processor does not have.
    """
    try:
        return load(built_library())
    except NativeUnavailableError as error:
        _log.warning("CPU kernels are not available, using slow torch code instead: %s", error)
        return None


def has_integer_products() -> bool:
    """Whether the kernels have integer products for the inexact modes of `Weight.compute`."""
    kernels = library()
    return kernels is not None and bool(kernels.caravan_has_integers())


def explain_bus_errors() -> None:
    """Make a bus error (SIGBUS) print the mapped file that caused it to standard error.

    The process still ends. Without native kernels this does nothing.
    """
    kernels = library()
    if kernels is not None:
        kernels.caravan_explain_bus_errors()


def needs_compiling() -> bool:
    """Whether `library` would compile, which takes 10 to 40 seconds of processor time."""
    return not library.cache_info().currsize and would_compile()


def kernel_level() -> str:
    """The instruction set of the kernels in use; "torch" without native ones."""
    kernels = library()
    return "torch" if kernels is None else kernels.caravan_level().decode()


def address(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """The address of the first element. ValueError unless the tensor has this shape and type, is
    contiguous and on the CPU: kernels do not check their pointers.
    """
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"a kernel takes {dtype} {list(shape)} here, not {tensor.dtype} {list(tensor.shape)}"
        )
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a kernel takes a contiguous tensor on the CPU, not one on {tensor.device} with "
            f"strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def row_address(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """As `address`, for tensors with contiguous rows and any stride between rows."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"a kernel takes contiguous rows, not strides {tensor.stride()}")
    if tensor.shape != tuple(shape) or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"a kernel takes {dtype} {list(shape)} on the CPU here, not {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )
    return tensor.data_ptr()


def load(path: Path) -> ctypes.CDLL:
    """Load a library with torch's OpenMP runtime, so that both use one thread pool. It is locked as
    long as the process lives; see `runtime.mapped_removal`."""
    try:
        if openmp() is None:
            raise NativeUnavailableError("torch runs without an OpenMP library")
        kernels = ctypes.CDLL(str(path))
        lock = os.open(path, os.O_RDONLY)  # stays open, like the library
    except OSError as error:
        raise NativeUnavailableError(str(error)) from error
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, result
        setattr(kernels, name, recordable(function))
    grids = all_grids()  # a variable, so that it exists until it is copied
    kernels.caravan_set_grids(address(grids, grids.shape, grids.dtype))
    return kernels


def main() -> None:
    """Compile the kernels if necessary, also if compilers have failed before; without a compiler,
    log the reason."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    forget_failures()
    library()


if __name__ == "__main__":
    main()
