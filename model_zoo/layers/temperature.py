"""Attention temperatures that grow with the position."""

from dataclasses import dataclass

from torch import Tensor

from runtime.kernels.pointwise import temper


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor((p + offset) / span)).

    Nakanishi, "Scalable-Softmax Is Superior for Attention", as used by Llama 4, Ministral 3 and
    Mistral Large 3.
    """

    beta: float
    span: float
    offset: int = 0

    def __call__(self, queries: Tensor, positions: Tensor) -> Tensor:
        """queries [tokens, heads, dim], positions [tokens] int64 -> like queries."""
        return temper(queries, positions, beta=self.beta, span=self.span, offset=self.offset)
