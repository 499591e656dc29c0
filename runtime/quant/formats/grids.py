"""The grids that the IQ formats index, read from `grids.bin`.

The file contains the grids of GRIDS in order. Each weight of a grid is stored as the index of its
level, in two bits, or in four if there are more than four levels, lowest bits of a byte first.
`tools/block_grids.py` writes the file from the tables of the `gguf` package, which are ggml's (MIT
licence).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

PATH = Path(__file__).with_name("grids.bin")


@dataclass(frozen=True, slots=True)
class Grid:
    """[rows, width] weights, each of them one of `levels`."""

    rows: int
    width: int
    levels: tuple[int, ...]

    @property
    def bits(self) -> int:
        return 2 if len(self.levels) <= 4 else 4

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * self.bits // 8


_TWO_BITS, _TERNARY = (8, 25, 43), (-1, 0, 1)
GRIDS: Mapping[str, Grid] = MappingProxyType(
    {
        "IQ2_XXS": Grid(256, 8, _TWO_BITS),
        "IQ2_XS": Grid(512, 8, _TWO_BITS),
        "IQ2_S": Grid(1024, 8, _TWO_BITS),
        "IQ3_XXS": Grid(256, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
        "IQ3_S": Grid(512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
        "IQ1_S": Grid(2048, 8, _TERNARY),
    }
)


def all_grids() -> Tensor:
    """int8 [weights]: every grid, in the order of GRIDS."""
    host = torch.device("cpu")
    return torch.cat([load_grid(name, host).flatten() for name in GRIDS]).to(torch.int8)


def grid_rows(name: str, index: Tensor) -> Tensor:
    """Integer [...] -> float32 [..., width]: a copy of these rows of the grid."""
    rows = load_grid(name, index.device).index_select(0, index.reshape(-1).int())
    return rows.view(*index.shape, rows.shape[1])


@cache
def load_grid(name: str, device: torch.device) -> Tensor:
    """float32 [rows, width], read once for each device."""
    grid, begin = GRIDS[name], 0
    for before in GRIDS:
        if before == name:
            break
        begin += GRIDS[before].nbytes
    data = PATH.read_bytes()
    assert len(data) == sum(each.nbytes for each in GRIDS.values()), f"{PATH} is damaged"
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)[begin : begin + grid.nbytes]
    fields = packed.unsqueeze(1) >> torch.arange(0, 8, grid.bits, dtype=torch.uint8)
    index = (fields & ((1 << grid.bits) - 1)).view(-1).int()
    levels = torch.tensor(grid.levels, dtype=torch.float32)
    return levels.index_select(0, index).view(grid.rows, grid.width).to(device)
