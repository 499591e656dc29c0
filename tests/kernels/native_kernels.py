"""Skips tests of the native kernels on machines without them."""

import shutil

import pytest

from runtime.kernels.native import has_integer_products, kernel_level, library
from runtime.kv.cache_types import CacheType

NATIVE_TYPES = [type for type in CacheType if type is not CacheType.FP8]


def need_compiler() -> None:
    if not any(map(shutil.which, ("gcc", "cc", "clang"))):
        pytest.skip("no C compiler here")


def require_native_kernels() -> None:
    if library() is None:
        pytest.skip("there is no C compiler, so there are no native kernels to test")


def require_integer_products() -> None:
    require_native_kernels()
    if not has_integer_products():
        pytest.skip("the kernels for this processor have no integer products")


def has_tile_registers() -> bool:
    """Whether the kernels multiply BF16 weights in the tile registers of AMX."""
    return kernel_level().endswith("-amx")
