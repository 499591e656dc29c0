"""Cache kinds and layouts: which cached positions a row may see, and how layers share pages."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class CacheKind(Protocol):
    """The earliest position that the row at `position` (and any later row) can see."""

    def first_visible(self, position: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Full:
    """Every row sees everything before it."""

    def first_visible(self, position: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Sliding:
    """Every row sees the last `window` positions, its own among them."""

    window: int

    def first_visible(self, position: int) -> int:
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class Chunked:
    """Every row sees its own chunk of `chunk` positions, up to itself."""

    chunk: int

    def first_visible(self, position: int) -> int:
        return position - position % self.chunk


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer stores for each position: a key and a value per kv head."""

    kind: CacheKind
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with equal declarations; they share page numbers, each with its own tensors."""

    cache: LayerCache
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a model's layers fall into groups, and how many tokens a page holds."""

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
