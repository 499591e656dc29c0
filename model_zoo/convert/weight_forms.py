"""How checkpoints store a weight as several tensors, such as integers and scales.

The formats are those of DeepSeek's and Mistral's checkpoints, compressed-tensors, NVIDIA's Model
Optimizer, GPTQ and AWQ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from model_zoo.convert.scaled_weights import Shape

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
EXPONENTS = frozenset({"U8", "F8_E8M0"})
EIGHT_BIT_FLOATS = frozenset({"F8_E4M3"})


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> str: ...

    def read(self) -> Tensor: ...


Parts = Mapping[str, Stored]
Tensors = Mapping[str, Tensor]
Types = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """GGUF blocks of one type that represent a weight exactly, up to one factor for all of them.

    exact: whether the parts of a weight can be such blocks.
    rows: uint8 [out, row bytes].
    factor: float32 [1]; None if it is 1.
    """

    type: str
    exact: Callable[[Parts], bool]
    rows: Callable[[Tensors], Tensor]
    factor: Callable[[Parts], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class WeightForm:
    """One way of storing a weight. The names of its parts share a prefix; their suffixes differ.

    needed, optional: the types that each part may have, by suffix. The first of `needed` holds the
    numbers of the weight; its type distinguishes forms with the same suffixes.
    shape: of the weight; None if the shapes of the parts do not fit each other.
    numbers: the weight, float32 of that shape.
    weight: the suffix of the weight's name.
    sliced: whether a slice of a stack of weights is computed from slices of the parts.
    blocks: the GGUF blocks that can hold the weight.
    """

    needed: Types
    shape: Callable[[Parts], Shape | None]
    numbers: Callable[[Tensors], Tensor]
    optional: Types = field(default_factory=lambda: MappingProxyType({}))
    weight: str = ""
    sliced: bool = False
    blocks: Blocks | None = None

    @property
    def first(self) -> str:
        return next(iter(self.needed))

    def names(self, name: str, stored: Mapping[str, Stored]) -> dict[str, str] | None:
        """The names of all parts by suffix, for the weight whose first part is `name`; None if
        that is no weight in this form."""
        if not name.endswith(self.first) or stored[name].dtype not in self.needed[self.first]:
            return None
        stem = name.removesuffix(self.first)
        found = {end: stem + end for end in (*self.needed, *self.optional) if stem + end in stored}
        return found if self.needed.keys() <= found.keys() else None

    def types(self, end: str) -> frozenset[str]:
        return {**self.needed, **self.optional}[end]
