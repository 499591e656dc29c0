"""What a sampler reads of each slot's request: declared by columns, kept on the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad


class TableColumn(NamedTuple):
    """A column of a table: the shape and type of a slot's values; `fill`: before it is loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0


@dataclass(frozen=True, slots=True)
class TableSpec:
    """`used_by`: whether a request needs a row; rows of other slots are not read. `rows`: the
    values of slots that need one, an array [loads, *shape] for each column."""

    columns: tuple[TableColumn, ...]
    used_by: Callable[[SamplingParams], bool]
    rows: Callable[[Sequence[SlotLoad]], tuple[ArrayLike, ...]]

    @property
    def row_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in self.columns)


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Rows of a table to replace: slots [n] int64, and values [n, *shape] for each column."""

    slots: Tensor
    values: tuple[Tensor, ...]


class SlotTable:
    """The rows of all slots on the device. columns: a tensor [slots, *shape] each."""

    def __init__(self, spec: TableSpec, *, slots: int, device: torch.device) -> None:
        self.spec = spec
        self.columns = tuple(
            torch.full((slots, *shape), fill, dtype=dtype, device=device)
            for shape, dtype, fill in spec.columns
        )

    def load(self, loaded: LoadedRows) -> None:
        for column, values in zip(self.columns, loaded.values, strict=True):
            column.index_copy_(0, loaded.slots, values)
