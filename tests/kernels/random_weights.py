"""Weights with random values, in any block type, and how far a product with them is off."""

import torch
from torch import Tensor

from runtime.quant import BlockType, Weight

_HALF_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def random_weight(type: BlockType, outs: int, elements: int, *, seed: int = 0) -> Weight:
    """Random bits with scales of moderate size, so that no sum overflows."""
    draw = torch.Generator().manual_seed(seed)
    if type.name in _PLAIN:
        values = torch.randn(outs, elements, generator=draw).to(_PLAIN[type.name])
        return Weight(values.view(torch.uint8), type, (outs, elements))
    blocks = outs * elements // type.block_elements
    data = torch.randint(0, 256, (blocks, type.block_bytes), generator=draw, dtype=torch.uint8)
    for offset in _HALF_SCALES[type.name]:
        scales = torch.randn(blocks, 1, generator=draw).mul(0.02).half()
        data[:, offset : offset + 2] = scales.view(torch.uint8)
    return Weight(data.view(outs, type.row_bytes(elements)), type, (outs, elements))


def relative_error(product: Tensor, x: Tensor, weight: Weight) -> float:
    """The largest error of x @ weight^T, relative to the lengths of the vectors multiplied."""
    dense = weight.dequantize().double()
    size = x.double().norm(dim=1, keepdim=True) * dense.norm(dim=1)
    return ((product.double() - x.double() @ dense.T).abs() / size).max().item()
