"""Tables of learned positions of the cells of a square, to be interpolated for rectangles."""

from collections.abc import Callable
from math import isqrt

import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.vision.vision_sizes import VisionSizes


def position_table(w: TensorScope, sizes: VisionSizes, name: str = "position_embd") -> Tensor:
    """The table [side * side, hidden], or [side, side, hidden], as float32 [1, hidden, side, side].
    Raises ModelFileError if the number of its rows is no square."""
    stored = w.shape(name, dimensions=2) or (1,)
    count = stored[0]
    if len(stored) == 3:
        table = w.table(f"{name}.weight", shape=(count, count, sizes.hidden))
        return table.permute(2, 0, 1)[None]
    side = isqrt(count)
    if side * side != count:
        raise sizes.metadata.error(
            "vision.patch_size", f"has a table of {count:,} places, which is not a square number"
        )
    table = w.table(f"{name}.weight", shape=(count, sizes.hidden))
    return table.t().reshape(1, sizes.hidden, side, side)


def gathered_positions(plane: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """[cells, hidden]: the places of a plane [1, hidden, rows, columns] of the cells in rows `down`
    [cells] and columns `across` [cells]."""
    return plane[0].flatten(1).t()[down * plane.shape[3] + across]


def add_positions_(x: Tensor, plane: Tensor, down: Tensor, across: Tensor) -> None:
    """Adds the `gathered_positions` to the cells of each image, x [images * cells, hidden]."""
    places = gathered_positions(plane, down, across)
    x.view(-1, len(down), x.shape[1]).add_(places.to(x.dtype))


def interpolating(
    table: Tensor, *, mode: str = "bilinear", aligned: bool = False
) -> Callable[[int, int], Tensor]:
    """A function of rows and columns: the table [1, hidden, side, side] interpolated to these."""

    def stretched(rows: int, columns: int) -> Tensor:
        return F.interpolate(table, size=(rows, columns), mode=mode, align_corners=aligned)

    return stretched
