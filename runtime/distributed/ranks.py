"""Ranks that compute one model together: how things are divided among them, what they exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

# How far the largest part may exceed an even one before blocks count as too coarse.
_MOST_UNEVEN = 1.125


class Ranks(Protocol):
    """`size` processes with a part of each large matrix; this one is number `rank`.

    All call the same methods in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """What all ranks bring, added up, on each of them; in x's type and of its shape."""
        ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [..., widths[rank]] of each rank -> [..., sum of widths] on each of them."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank that has everything."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Unconnected:
    """One of several ranks, for models that are built without data to see whether they can be."""

    size: int
    rank: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("these ranks are not connected")

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        raise AssertionError("these ranks are not connected")


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Split:
    """`parts[r]` = [begin, end): the things that rank r has, of which this is number `rank`.

    Parts follow each other, or are the same where ranks share.
    """

    parts: tuple[tuple[int, int], ...]
    rank: int

    @property
    def whole(self) -> bool:
        """Whether there is one rank alone."""
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
        """The same where each thing consists of so many rows."""
        return Split(tuple((rows * begin, rows * end) for begin, end in self.parts), self.rank)

    def beginning_at(self, first: int) -> "Split":
        """The same of things that are counted from `first` on."""
        return Split(tuple((first + b, first + e) for b, e in self.parts), self.rank)

    def falls_on(self, block: int) -> bool:
        """Whether every part begins and ends at a multiple of `block`."""
        return not any(bound % block for part in self.parts for bound in part)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Which query heads ranks have, and which key heads go with them."""

    heads: Split
    kv_heads: Split


def evenly(count: int, ranks: Ranks) -> Split:
    """Parts that differ by one at most."""
    return Split(_even_parts(count, ranks.size), ranks.rank)


def by_blocks(count: int, block: int, ranks: Ranks) -> Split:
    """Parts of whole blocks where these are about even, else of any size."""
    blocks, rest = divmod(count, block)
    largest = -(-blocks // ranks.size)
    if rest or largest * ranks.size > _MOST_UNEVEN * blocks:
        return evenly(count, ranks)
    return evenly(blocks, ranks).times(block)


def split_heads(heads: int, kv_heads: int, ranks: Ranks) -> HeadSplit:
    """Key heads and the query heads that go with each; where there are more ranks than key heads,
    some ranks have the same key head and a part of its queries. `ranks.size` is `heads` at most.
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
