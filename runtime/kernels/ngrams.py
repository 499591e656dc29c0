"""Rows of hashed tables of n-grams."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.native import address, library

# Tokens below this are exact in float32, with 1 added.
MOST_TOKENS = (1 << 24) - 1


@dataclass(frozen=True, slots=True, eq=False)
class NgramHashes:
    """How n-grams of 2 to `len(factors)` tokens are hashed, each by as many heads.

    factors int64 [longest n]: of the tokens, the last one first; a token times a factor must be
    below 2^63. sizes, offsets int64 [heads]: the rows of each head in the table, from the heads of
    the shortest n-grams on. end: the token before which nothing counts.
    """

    factors: Tensor
    sizes: Tensor
    offsets: Tensor
    end: int


def token_columns(tokens: Tensor, columns: int) -> Tensor:
    """tokens int64 [tokens], below `MOST_TOKENS` -> float32 [tokens, columns], each token + 1 in
    all columns."""
    if tokens.device.type != "cpu" or (kernels := library()) is None:
        return token_columns_twin(tokens, columns)
    result = torch.empty(len(tokens), columns)
    kernels.caravan_token_columns(
        address(tokens, (len(tokens),), torch.int64), len(tokens), columns, result.data_ptr()
    )
    return result


def ngram_rows(tokens: Tensor, before: Tensor, hashes: NgramHashes) -> Tensor:
    """tokens int64 [tokens], before float32 [tokens, longest n - 1] -> int64 [tokens, heads], the
    rows of each token's n-grams.

    before: the tokens before each token, the last one first, as of `token_columns`; 0 before the
    first. The hash of an n-gram is the exclusive or of its tokens times their factors. Tokens up to
    the last `hashes.end` before a token count as `hashes.end`, as do those before the first.
    """
    if tokens.device.type != "cpu" or (kernels := library()) is None:
        return ngram_rows_twin(tokens, before, hashes)
    count, most, heads = len(tokens), len(hashes.factors), len(hashes.sizes)
    result = torch.empty(count, heads, dtype=torch.int64)
    kernels.caravan_ngram_rows(
        address(tokens, (count,), torch.int64), address(before, (count, most - 1)),
        address(hashes.factors, (most,), torch.int64), address(hashes.sizes, (heads,), torch.int64),
        address(hashes.offsets, (heads,), torch.int64), count, most, heads // (most - 1), heads,
        hashes.end, result.data_ptr(),
    )  # fmt: skip
    return result


def token_columns_twin(tokens: Tensor, columns: int) -> Tensor:
    """The specification of `token_columns`."""
    return (tokens + 1).float().unsqueeze(1).repeat(1, columns)


def ngram_rows_twin(tokens: Tensor, before: Tensor, hashes: NgramHashes) -> Tensor:
    """The specification of `ngram_rows`."""
    earlier = before.long() - 1
    ended = ((earlier < 0) | (earlier == hashes.end)).cumsum(dim=1) > 0
    earlier = earlier.masked_fill(ended, hashes.end)
    hashed, found = tokens * hashes.factors[0], []
    for n, sizes in enumerate(hashes.sizes.view(len(hashes.factors) - 1, -1), start=1):
        hashed = hashed ^ (earlier[:, n - 1] * hashes.factors[n])
        found.append(hashed.unsqueeze(1) % sizes)
    return torch.cat(found, dim=1) + hashes.offsets
