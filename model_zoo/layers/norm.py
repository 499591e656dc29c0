"""RMS and layer norms with weights of a file."""

from dataclasses import dataclass

from torch import Tensor

from runtime.kernels.pointwise import layer_norm, rms_norm


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """weight float32 [size], or None for ones. x [..., size] -> like x, computed in float32."""

    weight: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class AcrossHeads:
    """One norm across all heads of a row. x [tokens, heads, size] -> like x."""

    norm: RMSNorm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1)).view_as(x)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """weight and bias float32 [size]. x [..., size] -> like x, computed in float32."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)
