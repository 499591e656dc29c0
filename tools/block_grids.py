"""`python -m tools.block_grids`: writes the file with the grids of the IQ block formats, from the
tables of the `gguf` package, with which a test compares it.

The format is described in `runtime/quant/formats/grids.py`. The tables are ggml's (MIT licence).
"""

import gguf.quants
import numpy as np

from runtime.quant.formats.grids import GRIDS, PATH, Grid


def grids_file() -> bytes:
    """The content of the file, from the tables of the package."""
    return b"".join(_packed(name, grid) for name, grid in GRIDS.items())


def _packed(name: str, grid: Grid) -> bytes:
    values = reference_grid(name)
    if values.shape != (grid.rows, grid.width):
        raise SystemExit(f"{name}: gguf's grid has the shape {values.shape}")
    unknown = set(values.flat) - set(grid.levels)
    if unknown:
        raise SystemExit(f"{name}: gguf's grid has the levels {sorted(unknown)} too")
    index = np.searchsorted(grid.levels, values).astype(np.uint8).reshape(-1, 8 // grid.bits)
    shifts = np.arange(0, 8, grid.bits, dtype=np.uint8)
    return np.bitwise_or.reduce(index << shifts, axis=1).tobytes()


def reference_grid(name: str) -> np.ndarray:
    """float32 [rows, width]: the grid of the package."""
    format = getattr(gguf.quants, name)
    format.init_grid()
    return format.grid.reshape(format.grid_shape)


if __name__ == "__main__":
    PATH.write_bytes(grids_file())
