"""GGUF block formats: their sizes, and the layouts of rows of blocks.

The layouts are those of the GGUF format's `ggml` block types; the `gguf` package is the reference.
Reading the header of a file needs them, so they are known without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from runtime.errors import UnsupportedModelError

# Rows of weights that are interleaved in tiles.
TILE_ROWS = 16
# The bytes of a row in planes are padded to a multiple of this.
PLANES_ROW_MULTIPLE = 16


class WeightLayout(Enum):
    """The order of the bytes of a matrix.

    BLOCKS: rows of blocks, as in files. PLANES: rows, each rearranged for CUDA devices; only whole
    rows can be decoded. TILES: 16 rows at a time interleaved, for CPUs; see `formats/row_tiles.py`.
    """

    BLOCKS = 0
    PLANES = 1
    TILES = 2


@dataclass(frozen=True, slots=True)
class BlockType:
    """A format that stores `block_elements` consecutive weights of a row in `block_bytes` bytes.

    blocks: for a rearranged layout, the type of the same weights in a file; else None.
    """

    id: int
    name: str
    block_elements: int
    block_bytes: int
    layout: WeightLayout = WeightLayout.BLOCKS
    blocks: "BlockType | None" = None

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of `elements` weights, a multiple of `block_elements`."""
        assert elements % self.block_elements == 0, (self.name, elements)
        plain = elements // self.block_elements * self.block_bytes
        return plain + -plain % PLANES_ROW_MULTIPLE if self.layout is WeightLayout.PLANES else plain

    @property
    def interleaved_rows(self) -> int:
        """Rows that are stored together, so that only multiples of them can be sliced."""
        return TILE_ROWS if self.layout is WeightLayout.TILES else 1

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in bytes of a tensor with this logical shape, in torch order: [..., rows,
        row bytes]; in tiles [..., rows / 16, 16 * row bytes]."""
        row_bytes, rows = self.row_bytes(shape[-1]), self.interleaved_rows
        if rows == 1:
            return *shape[:-1], row_bytes
        assert shape[-2] % rows == 0, (self.name, shape)
        return *shape[:-2], shape[-2] // rows, rows * row_bytes


_TYPES = (
    BlockType(0, "F32", 1, 4),
    BlockType(1, "F16", 1, 2),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(3, "Q4_1", 32, 20),
    BlockType(6, "Q5_0", 32, 22),
    BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(10, "Q2_K", 256, 84),
    BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
    BlockType(16, "IQ2_XXS", 256, 66),
    BlockType(17, "IQ2_XS", 256, 74),
    BlockType(18, "IQ3_XXS", 256, 98),
    BlockType(19, "IQ1_S", 256, 50),
    BlockType(20, "IQ4_NL", 32, 18),
    BlockType(21, "IQ3_S", 256, 110),
    BlockType(22, "IQ2_S", 256, 82),
    BlockType(23, "IQ4_XS", 256, 136),
    BlockType(24, "I8", 1, 1),
    BlockType(25, "I16", 1, 2),
    BlockType(26, "I32", 1, 4),
    BlockType(27, "I64", 1, 8),
    BlockType(28, "F64", 1, 8),
    BlockType(29, "IQ1_M", 256, 56),
    BlockType(30, "BF16", 1, 2),
    BlockType(34, "TQ1_0", 256, 54),
    BlockType(35, "TQ2_0", 256, 66),
    BlockType(39, "MXFP4", 32, 17),
    BlockType(40, "NVFP4", 64, 36),
)
BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType({t.id: t for t in _TYPES})
# MXFP4 with adjacent elements in one byte, as in the first gpt-oss files, which reuse the id of a
# removed GGUF type.
MXFP4_PAIRS = BlockType(4, "MXFP4_PAIRS", 32, 17)
# F16 and BF16 for integer products, in no file; likewise.
Q16_0 = BlockType(5, "Q16_0", 32, 65)


def block_type(name: str) -> BlockType:
    """The block type with this GGUF name; `UnsupportedModelError` if there is none."""
    for candidate in _TYPES:
        if candidate.name == name:
            return candidate
    known = ", ".join(t.name for t in _TYPES)
    raise UnsupportedModelError(f"Block type {name} is not supported; supported are {known}.")
