"""Skips tests of the native kernels on machines without them."""

import pytest

from runtime.kernels.native import library


def require_native_kernels() -> None:
    if library() is None:
        pytest.skip("there is no C compiler, so there are no native kernels to test")
