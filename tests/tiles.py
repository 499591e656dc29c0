"""Weights in tiles, whether or not this processor multiplies them."""

from runtime.quant.block_types import Q16_0, BlockType
from runtime.quant.weight import TILED_TYPES, Weight

_TILED = {type.blocks.name: type for type in TILED_TYPES.values() if type.blocks is not None}


def tiled_type(type: BlockType) -> BlockType | None:
    """The type of tiles for weights of this type; None if there is none."""
    return _TILED.get(Q16_0.name if type.name in ("F16", "BF16") else type.name)


def in_tiles(weight: Weight) -> Weight:
    type = tiled_type(weight.type)
    assert type is not None, weight.type.name
    return weight.in_tiles(type)
