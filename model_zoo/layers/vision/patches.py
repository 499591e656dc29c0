"""Converts pixels to rows: patches of an image, each multiplied by one matrix."""

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.linear import Linear
from model_zoo.layers.vision.names import known_as
from model_zoo.layers.vision.vision_sizes import CHANNELS, VisionSizes
from runtime.quant.block_types import block_type
from runtime.quant.weight import Weight


def squares(pixels: Tensor, side: int) -> Tensor:
    """pixels [images, channels, height, width] -> [images, patches, channels * side * side].

    Patches are in row-major order. Surplus pixels at the right and bottom are dropped.
    """
    images, channels, height, width = pixels.shape
    down, right = height // side, width // side
    cut = pixels[:, :, : down * side, : right * side]
    parts = cut.reshape(images, channels, down, side, right, side)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(images, -1, channels * side * side)


def patch_embedding(w: TensorScope, sizes: VisionSizes, *names: str) -> Linear:
    """A convolution whose stride is its size, under one of these names: [n, pixels] -> [n, hidden].

    Its small matrix is kept in float32.
    """
    name = known_as(w, *names)
    flat = (sizes.hidden, sizes.patch_elements)
    stored = w.shape(name)
    table = w.table(f"{name}.weight", shape=flat if stored and len(stored) == 2 else _square(sizes))
    return Linear(in_float32(table.reshape(flat)), read_bias(w, name, sizes.hidden))


def frame_embedding(w: TensorScope, sizes: VisionSizes, *names: str) -> Linear:
    """As `patch_embedding`, where an image counts as successive equal frames, so that the frames'
    matrices are summed.

    names: names of the frames' tensors, with suffix. The bias is that of `patch_embd`.
    """
    summed = w.table(names[0], shape=_square(sizes))
    for name in names[1:]:
        summed = summed + w.table(name, shape=_square(sizes))
    bias = read_bias(w, "patch_embd", sizes.hidden)
    return Linear(in_float32(summed.flatten(1)), bias)


def stacked_frame_embedding(
    w: TensorScope, sizes: VisionSizes, name: str, *, frames: int
) -> Linear:
    """As `frame_embedding`, from one tensor (hidden * channels, frames, side, side)."""
    shape = (sizes.hidden * CHANNELS, frames, sizes.patch, sizes.patch)
    summed = w.table(f"{name}.weight", shape=shape).sum(1)
    flat = summed.reshape(sizes.hidden, sizes.patch_elements)
    return Linear(in_float32(flat), read_bias(w, name, sizes.hidden))


def row_convolution(w: TensorScope, name: str, *, hidden: int, out: int, side: int) -> Linear:
    """A convolution whose stride is its size, over squares of `side` x `side` rows of features in
    row-major order: [n, side * side * hidden] -> [n, out]. Its matrix is kept in float32."""
    table = w.table(f"{name}.weight", shape=(out, hidden, side, side))
    flat = table.permute(0, 2, 3, 1).flatten(1)
    return Linear(in_float32(flat), read_bias(w, name, out))


def read_bias(w: TensorScope, name: str, size: int) -> Tensor | None:
    bias = w.table(f"{name}.bias", shape=(size,), optional=True)
    return None if bias is None else bias.to(w.dtype)


def in_float32(matrix: Tensor) -> Weight:
    """matrix float32 (out, in) as a weight."""
    out, elements = matrix.shape
    return Weight(matrix.contiguous().view(torch.uint8), block_type("F32"), (out, elements))


def _square(sizes: VisionSizes) -> tuple[int, ...]:
    return (sizes.hidden, CHANNELS, sizes.patch, sizes.patch)
