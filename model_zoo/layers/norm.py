"""Norms with a file's weights."""

from dataclasses import dataclass

from torch import Tensor

from runtime.kernels.pointwise import rms_norm


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """weight float32 [size]. x [..., size] -> like x, computed in float32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
