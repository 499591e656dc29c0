"""Random weights of any block type, and the error of a product with them."""

import numpy as np
import torch
from torch import Tensor

from runtime.quant.block_types import BlockType
from runtime.quant.weight import Weight
from tests.block_samples import NUMBERS, random_blocks, set_scales

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def random_weight(type: BlockType, outs: int, elements: int, *, seed: int = 0) -> Weight:
    """Random bits with moderate scales, so that no sum overflows."""
    draw, shape = torch.Generator().manual_seed(seed), (outs, elements)
    if type.name in _PLAIN:
        values = torch.randn(shape, generator=draw).to(_PLAIN[type.name])
        return Weight(values.view(torch.uint8), type, shape)
    if type.name in NUMBERS:
        numbers = torch.randn(shape, generator=draw, dtype=torch.float64) * 50
        away_from_nought = numbers.sign() * (numbers.abs() + 1).clamp(max=127)
        stored = away_from_nought.numpy().astype(NUMBERS[type.name])
        return Weight(torch.from_numpy(stored.view(np.uint8)), type, shape)
    random = np.random.default_rng(seed)
    data = random_blocks(type, (outs, elements // type.block_elements), random=random)
    blocks = data.reshape(-1, type.block_bytes)
    set_scales(data, type, torch.randn(len(blocks), generator=draw).mul(0.02).numpy())
    if type.name in ("MXFP4", "MXFP4_PAIRS"):
        blocks[:, 0] = 112 + blocks[:, 0] % 16
    return Weight(torch.from_numpy(data), type, shape)


def relative_error(product: Tensor, x: Tensor, weight: Weight) -> float:
    """The largest error of x @ weight^T, relative to the norms of the vectors."""
    dense = weight.dequantize().double()
    size = x.double().norm(dim=1, keepdim=True) * dense.norm(dim=1)
    return ((product.double() - x.double() @ dense.T).abs() / size).max().item()


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded_rows(x: Tensor, largest: int) -> Tensor:
    """x [rows, elements] as integers up to `largest` times one scale for each 32, in float64."""
    groups, most = x.unflatten(-1, (-1, 32)), torch.tensor(float(largest))
    top = groups.abs().amax(-1, keepdim=True)
    integers = (groups * (most / top)).round()
    return (integers.double() * (top / most).double()).flatten(-2)
