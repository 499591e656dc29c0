"""Ranks that compute one model together: collectives, and the division of heads and columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

# Parts are made of whole blocks if the largest one exceeds an even part by at most this factor.
_MOST_UNEVEN = 1.125


class Ranks(Protocol):
    """`size` processes, each with a part of every large matrix; this is process `rank`.

    All must call the same methods in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, on each of them; in x's type and shape."""
        ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [..., widths[rank]] of each rank -> [..., sum of widths] on each of them."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """A single rank with the whole model."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Unconnected:
    """One of several ranks without connections, for models that are built without data."""

    size: int
    rank: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("these ranks are not connected")

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        raise AssertionError("these ranks are not connected")


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Split:
    """`parts[r]` = [begin, end): the heads, columns or experts of rank r; this is rank `rank`.

    Parts are consecutive; ranks that share a part have equal ones.
    """

    parts: tuple[tuple[int, int], ...]
    rank: int

    @property
    def whole(self) -> bool:
        """Whether there is only one rank."""
        return len(self.parts) == 1

    @property
    def begin(self) -> int:
        return self.parts[self.rank][0]

    @property
    def end(self) -> int:
        return self.parts[self.rank][1]

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.parts)

    def times(self, rows: int) -> "Split":
        """The split of rows, where each element has `rows` of them."""
        return Split(tuple((rows * begin, rows * end) for begin, end in self.parts), self.rank)

    def beginning_at(self, first: int) -> "Split":
        """The same split with indices that start at `first`."""
        return Split(tuple((first + b, first + e) for b, e in self.parts), self.rank)

    def falls_on(self, block: int) -> bool:
        """Whether every part begins and ends at a multiple of `block`."""
        return not any(bound % block for part in self.parts for bound in part)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The query heads of each rank, and the key heads that they use."""

    heads: Split
    kv_heads: Split


def evenly(count: int, ranks: Ranks) -> Split:
    """Parts whose sizes differ by at most one."""
    return Split(_even_parts(count, ranks.size), ranks.rank)


def by_blocks(count: int, block: int, ranks: Ranks) -> Split:
    """Parts of whole blocks if these are nearly even, else parts of any size."""
    blocks, rest = divmod(count, block)
    largest = -(-blocks // ranks.size)
    if rest or largest * ranks.size > _MOST_UNEVEN * blocks:
        return evenly(count, ranks)
    return evenly(blocks, ranks).times(block)


def split_heads(heads: int, kv_heads: int, ranks: Ranks) -> HeadSplit:
    """Each rank's key heads and their query heads. With more ranks than key heads, ranks share a
    key head and divide its query heads. `ranks.size` is at most `heads`.
    """
    assert ranks.size <= heads and heads % kv_heads == 0
    group = heads // kv_heads
    if ranks.size <= kv_heads:
        keys = evenly(kv_heads, ranks)
        return HeadSplit(keys.times(group), keys)
    queries, keys_of = [], []
    for head, (first, end) in enumerate(_even_parts(ranks.size, kv_heads)):
        for begin, stop in _even_parts(group, end - first):
            queries.append((head * group + begin, head * group + stop))
            keys_of.append((head, head + 1))
    return HeadSplit(Split(tuple(queries), ranks.rank), Split(tuple(keys_of), ranks.rank))


def _even_parts(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    bounds = [-(-count * part // parts) for part in range(parts + 1)]
    return tuple(pairwise(bounds))
