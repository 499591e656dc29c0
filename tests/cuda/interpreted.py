"""Models and kernels in Triton's interpreter, on a CPU, as a CUDA device computes them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from model_zoo.gguf import tensors
from runtime.quant.weight import Weight

CPU = torch.device("cpu")


def _dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
    """Rounded once from float64: numpy adds in an order that depends on a row's place in a tile,
    tensor cores do not."""
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return TensorHandle(product.astype(d.data.dtype) + d.data, tl.float32)


@contextmanager
def placeless_products() -> Iterator[None]:
    """Products of tiles give a row the same bits at each of their places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        yield


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Every kernel is Triton's, and weights are in planes where they can be."""

    def placed(weight: Weight, device: torch.device) -> Weight:
        return weight.in_planes(device)

    with placeless_products(), pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("runtime.kernels."):
                if hasattr(module, "has_kernels"):
                    patch.setattr(module, "has_kernels", lambda device: True)
                if hasattr(module, "library"):
                    patch.setattr(module, "library", lambda: None)
        patch.setattr("runtime.kernels.attention.native_kernels", lambda pages: None)
        patch.setattr(tensors, "_on_device", placed)
        yield
