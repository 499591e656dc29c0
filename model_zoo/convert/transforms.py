"""Transformations of stored tensors for the file; all of them work on meta tensors too."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Transform
from model_zoo.convert.stored_blocks import mxfp4_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """A transform that only moves whole rows, so it applies to blocks as well as to numbers."""

    move: Transform

    def __call__(self, config: Configuration, *tensors: Tensor) -> Tensor:
        return self.move(config, *tensors)


def interleaved(heads_key: str) -> Transform:
    """Interleaves the rows of rotated heads: `transformers` rotates row j with row j + d/2.

    heads_key: the setting with the number of heads. weight [heads * d, in] or bias [heads * d].
    """

    def transform(config: Configuration, rows: Tensor) -> Tensor:
        counted = heads_key if config.get(heads_key) is not None else "num_attention_heads"
        heads = config.require_size(counted)
        if rows.shape[0] % (2 * heads):
            raise config.error(f"has {heads} as `{heads_key}`, but there are {rows.shape[0]} rows")
        halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    return Rows(transform)


def plus_one(config: Configuration, weight: Tensor) -> Tensor:
    """Adds 1 to norm weights, which Gemma's checkpoints store less one."""
    return weight.float() + 1


def rates(config: Configuration, logarithms: Tensor) -> Tensor:
    """Rates of decay from the logarithms of their amounts."""
    return -logarithms.float().exp()


@Rows
def unchanged(config: Configuration, tensor: Tensor) -> Tensor:
    return tensor


def transposed(config: Configuration, matrix: Tensor) -> Tensor:
    """[..., in, out] -> [..., out, in]."""
    return matrix.transpose(-2, -1)


@Rows
def first_half(config: Configuration, rows: Tensor) -> Tensor:
    """The first half of the rows, [2 n, ...] -> [n, ...]."""
    return rows[: rows.shape[0] // 2]


@Rows
def second_half(config: Configuration, rows: Tensor) -> Tensor:
    return rows[rows.shape[0] // 2 :]


@Rows
def even_rows(config: Configuration, rows: Tensor) -> Tensor:
    return rows[0::2]


@Rows
def odd_rows(config: Configuration, rows: Tensor) -> Tensor:
    return rows[1::2]


def after_transposing(transform: Transform) -> Transform:
    """A transform that transposes the matrix first."""
    return lambda config, matrix: transform(config, matrix.transpose(-2, -1))


def joined(config: Configuration, *parts: Tensor) -> Tensor:
    """All rows, in the order of the rule's sources."""
    return torch.cat(parts)


def flattened(config: Configuration, row: Tensor) -> Tensor:
    """[1, n] -> [n]."""
    return row.flatten()


def attention_parts(rows: Tensor, key_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """rows [all heads * size, ...], in which the queries of each key head are followed by its key
    and its value -> those of all queries, all keys and all values, [heads * size, ...] each."""
    groups = rows.unflatten(0, (key_heads, -1, size))
    queries, keys, values = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return queries.flatten(0, 2), keys.flatten(0, 2), values.flatten(0, 2)


def squeezed(config: Configuration, convolution: Tensor) -> Tensor:
    """[channels, 1, width] -> [channels, width]."""
    return convolution.squeeze(1)


def scalar(config: Configuration, value: Tensor) -> Tensor:
    """A number as a vector of one element."""
    return value.reshape(1)


def repacked_mxfp4(config: Configuration, blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [rows, n, 16], scales uint8 [rows, n] -> uint8 [rows, n * 17]."""
    return mxfp4_rows(blocks, scales)
