"""The forms in which checkpoints store one weight as several tensors, such as integers and scales.

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
    """Blocks of a type of GGUF with the numbers of a weight, apart from one factor for all.

    exact: whether these parts of a weight have such blocks.
    rows: uint8 [out, row bytes].
    factor: float32 [1]; None if it is 1.
    """

    type: str
    exact: Callable[[Parts], bool]
    rows: Callable[[Tensors], Tensor]
    factor: Callable[[Parts], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class WeightForm:
    """A form of a weight. The names of its parts have a common beginning and an end of their own.

    needed, optional: the ends, and the types of these parts; the first of `needed` has the weight's
    numbers, and by its type forms are told apart.
    shape: of the weight, or None if the shapes of its parts do not fit.
    numbers: float32 of that shape.
    weight: the end of the weight's name.
    sliced: whether slices of a stack of weights are computed from slices of the parts.
    blocks: in which files may have the weight.
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
        """The names of all parts, by their ends, of the weight whose first one has this name; None
        if there is none in this form."""
        if not name.endswith(self.first) or stored[name].dtype not in self.needed[self.first]:
            return None
        stem = name.removesuffix(self.first)
        found = {end: stem + end for end in (*self.needed, *self.optional) if stem + end in stored}
        return found if self.needed.keys() <= found.keys() else None

    def types(self, end: str) -> frozenset[str]:
        return {**self.needed, **self.optional}[end]
