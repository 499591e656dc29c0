"""What layers store in the cache, and how layers form groups with pages of their own."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from runtime.kv.cache_kinds import CacheKind, pages_touched


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer stores for each position: a key and a value per kv head.

    `exact`: stored in float32 regardless of the cache type. `divided_heads`: the number of the
    layer's kv heads on all ranks together, so that layers form the same groups on each rank.
    `values_in_keys`: a value is the beginning of its key, and only the key is stored.
    """

    kind: CacheKind
    kv_heads: int
    key_dim: int
    value_dim: int
    divided_heads: int | None = field(default=None, kw_only=True)
    values_in_keys: bool = field(default=False, kw_only=True)
    exact: ClassVar[bool] = False

    def page_shapes(self, page_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the layer's two pages: cells, then the elements of a row."""
        cells = (page_tokens, self.kv_heads)
        key_dim, value_dim = self.stored_dims
        return (*cells, key_dim), (*cells, value_dim)

    @property
    def stored_dims(self) -> tuple[int, int]:
        """The elements that are stored of a key and of a value."""
        return self.key_dim, 0 if self.values_in_keys else self.value_dim

    def page_elements(self, page_tokens: int) -> int:
        return sum(map(prod, self.page_shapes(page_tokens)))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with equal declarations; they share page numbers, each with its own tensors."""

    cache: LayerCache
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache groups of a model's layers, and the number of indices per page."""

    groups: tuple[CacheGroup, ...]
    page_tokens: int

    @classmethod
    def of(cls, layers: Iterable[LayerCache], *, page_tokens: int) -> "CacheLayout":
        """Group equal declarations, in order of first appearance."""
        members: dict[LayerCache, list[int]] = {}
        for index, cache in enumerate(layers):
            members.setdefault(cache, []).append(index)
        groups = tuple(CacheGroup(cache, tuple(ids)) for cache, ids in members.items())
        return cls(groups, page_tokens)

    @property
    def kinds(self) -> tuple[CacheKind, ...]:
        return tuple(group.cache.kind for group in self.groups)

    @property
    def image_rows(self) -> int:
        """Maximum number of image rows of a sequence, and therefore of a step."""
        return max((kind.capacity(0) for kind in self.kinds if kind.by_image), default=0)

    @property
    def most_images(self) -> int | None:
        limits = [kind.most_images for kind in self.kinds if kind.most_images is not None]
        return min(limits, default=None)

    def capacity_pages(self, context_tokens: int) -> tuple[int, ...]:
        """Per group: maximum number of pages that a sequence of `context_tokens` tokens fills."""
        return tuple(-(-k.capacity(context_tokens) // self.page_tokens) for k in self.kinds)

    def held_pages(self, context_tokens: int, in_flight: int) -> tuple[int, ...]:
        """Per group: maximum number of pages that a sequence holds at once, with `in_flight`
        unconfirmed positions."""
        whole = self.capacity_pages(context_tokens)
        return tuple(
            min(pages, pages_touched(kind.reach(context_tokens) - 1 + in_flight, self.page_tokens))
            for kind, pages in zip(self.kinds, whole, strict=True)
        )
