"""Cache kinds and layouts: what rows fill and see of a cache, and how layers share pages."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import ClassVar, Protocol


class Image(Protocol):
    """What a kind needs to know of an image in a sequence; see runtime.engine.request.ImageSpan."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def whole(self) -> bool: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def cross_rows(self) -> int: ...

    @property
    def cross_padding(self) -> int: ...


Images = Sequence[Image]


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Where the rows of an image lie in a group that is indexed by image rows.

    `padding` is empty where nobody sees the image's padding.
    """

    image: Image
    rows: range
    padding: range


class CacheKind(Protocol):
    """What a sequence fills and sees of a cache, as pure functions; nothing else tells kinds apart.

    A sequence fills the indices 0, 1, ... of each group: with its positions, or, where the kind
    is `by_image`, with the rows of its images; where it is `by_sequence`, index 0 alone, which
    every step writes anew (runtime/kv/states.py). `images` are the sequence's, by position.
    `most_images`: how many these may be, None for any number. `alignment`: page sizes must divide
    it.
    """

    @property
    def by_image(self) -> bool: ...

    @property
    def by_sequence(self) -> bool: ...

    @property
    def most_images(self) -> int | None: ...

    @property
    def alignment(self) -> int: ...

    def first_visible(self, position: int, images: Images = ()) -> int:
        """The first index that the row at `position`, or any later one, can see."""

    def seen(self, start: int, end: int, images: Images = ()) -> tuple[list[int], list[int]]:
        """Begin and end of what each of the rows at the positions [start, end) sees."""

    def extent(self, end: int, images: Images = ()) -> int:
        """The index after the last one that the rows before `end` fill."""

    def begun(self, start: int, end: int, images: Images = ()) -> tuple[ImagePlace, ...]:
        """The images whose rows are to be filled when the positions [start, end) are computed."""

    def capacity(self, context_tokens: int) -> int:
        """The extent of a sequence of so many tokens at most."""

    def reach(self, context_tokens: int) -> int:
        """How many indices lie between the first visible and the extent at most, both included."""

    def content(self, begin: int, end: int, images: Images) -> bytes | None:
        """What the indices [begin, end) hold; None where the tokens before them say it."""

    def foreseen(self, images: Images) -> bytes:
        """What rows know of the images behind them, so that it is part of every prefix."""


class _Positions:
    """What kinds have in common whose indices are the positions of a sequence."""

    __slots__ = ()
    looks_ahead = True
    by_image = by_sequence = False
    most_images = None
    alignment = 0

    def first_visible(self, position: int, images: Images = ()) -> int:
        raise NotImplementedError

    def seen(self, start: int, end: int, images: Images = ()) -> tuple[list[int], list[int]]:
        """Each row sees up to itself; where the kind looks ahead, rows of an image that is one
        whole see up to its end."""
        first, last = self.first_visible(start), self.first_visible(end - 1)
        if first == last:  # it never falls, so it is the same in between
            begins = [first] * (end - start)
        else:
            begins = [self.first_visible(position) for position in range(start, end)]
        ends = list(range(start + 1, end + 1))
        for image in images if self.looks_ahead else ():
            if image.whole and image.start < end and start < image.end:
                assert image.end <= end, "a step ends inside a whole image"
                inside = range(max(image.start, start), image.end)
                ends[inside.start - start : inside.stop - start] = [image.end] * len(inside)
        return begins, ends

    def extent(self, end: int, images: Images = ()) -> int:
        return end

    def begun(self, start: int, end: int, images: Images = ()) -> tuple[ImagePlace, ...]:
        return ()

    def capacity(self, context_tokens: int) -> int:
        return context_tokens

    def content(self, begin: int, end: int, images: Images) -> bytes | None:
        return None

    def foreseen(self, images: Images) -> bytes:
        return b""


@dataclass(frozen=True, slots=True)
class Full(_Positions):
    """Every row sees everything before it; rows of a whole image all of it, if it `looks_ahead`."""

    looks_ahead: bool = True

    def first_visible(self, position: int, images: Images = ()) -> int:
        return 0

    def reach(self, context_tokens: int) -> int:
        return context_tokens


@dataclass(frozen=True, slots=True)
class Sliding(_Positions):
    """Every row sees the last `window` positions, its own among them; rows of a whole image also
    the rest of it, if it `looks_ahead`."""

    window: int
    looks_ahead: bool = True

    def first_visible(self, position: int, images: Images = ()) -> int:
        return max(0, position - self.window + 1)

    def reach(self, context_tokens: int) -> int:
        return min(self.window, context_tokens)


@dataclass(frozen=True, slots=True)
class Chunked(_Positions):
    """Every row sees its own chunk of `chunk` positions, up to itself."""

    chunk: int

    def first_visible(self, position: int, images: Images = ()) -> int:
        return position - position % self.chunk

    def reach(self, context_tokens: int) -> int:
        return min(self.chunk, context_tokens)


@dataclass(frozen=True, slots=True)
class Cross:
    """Rows see rows of images, which are filled once, when the first of their placeholders is.

    Images with neighbouring placeholders form a run, and a row sees the images of the last run
    that has begun, as far as these have. A row before the first image sees nothing; with
    `lead_in` it sees all rows of all images, padding too, so that all are filled at the start.
    A sequence has at most `most_images` of at most `image_rows` rows each, padding included.
    Runs begin at multiples of `alignment`, so that none shares a page with another.
    """

    most_images: int
    image_rows: int
    lead_in: bool = False
    alignment: int = 64

    @property
    def by_image(self) -> bool:
        return True

    @property
    def by_sequence(self) -> bool:
        return False

    def first_visible(self, position: int, images: Images = ()) -> int:
        return self.seen(position, position + 1, images)[0][0]

    def seen(self, start: int, end: int, images: Images = ()) -> tuple[list[int], list[int]]:
        blocks = list(self._blocks(images))
        everything = blocks[0].places[-1].rows.stop if blocks and blocks[0].ahead else 0
        begins, ends = [0] * (end - start), [everything] * (end - start)
        for block in blocks:
            for run in _runs(block.places):
                for place in run:
                    after = max(place.image.start - start, 0)
                    count = max(end - start - after, 0)
                    begins[after:] = [run[0].rows.start] * count
                    ends[after:] = [place.rows.stop] * count
        return begins, ends

    def extent(self, end: int, images: Images = ()) -> int:
        return max((b.end for b in self._blocks(images) if b.position < end), default=0)

    def begun(self, start: int, end: int, images: Images = ()) -> tuple[ImagePlace, ...]:
        blocks = self._blocks(images)
        return tuple(place for b in blocks if start <= b.position < end for place in b.places)

    def capacity(self, context_tokens: int) -> int:
        return self.most_images * _aligned(self.image_rows, self.alignment)

    def reach(self, context_tokens: int) -> int:
        return self.capacity(context_tokens)

    def content(self, begin: int, end: int, images: Images) -> bytes | None:
        for block in self._blocks(images):
            if block.begin <= begin < block.end:
                return b"%d-%d of " % (begin - block.begin, end - block.begin) + block.name
        raise AssertionError("no image has these rows")

    def foreseen(self, images: Images) -> bytes:
        return next((b.name for b in self._blocks(images) if b.ahead), b"")

    def _blocks(self, images: Images) -> Iterator["_Block"]:
        """Images that are filled together: those of a run, or with text before them all."""
        brought = [image for image in images if image.cross_rows]
        ahead = self.lead_in and bool(brought) and brought[0].start > 0
        begin = 0
        for part in [brought] if ahead else _neighbours(brought):
            position = 0 if ahead else part[0].start
            places = _placed(part, begin, padded=ahead)
            end = begin + _aligned(places[-1].rows.stop - begin, self.alignment)
            yield _Block(position, begin, end, places)
            begin = end


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [begin, end) of images, filled when the row at `position` is computed."""

    position: int
    begin: int
    end: int
    places: tuple[ImagePlace, ...]

    @property
    def ahead(self) -> bool:
        """Whether text sees the images before they begin."""
        return self.position < self.places[0].image.start

    @property
    def name(self) -> bytes:
        parts = [(p.image.digest.hex().encode(), len(p.rows), len(p.padding)) for p in self.places]
        return b",".join(b"%s:%d+%d" % part for part in parts)


def _placed(images: Images, begin: int, *, padded: bool) -> tuple[ImagePlace, ...]:
    """Padding comes first: once the rows that see it are gone, its pages are."""
    sizes = [image.cross_padding if padded else 0 for image in images]
    places, padding, rows = [], begin, begin + sum(sizes)
    for image, size in zip(images, sizes, strict=True):
        place = ImagePlace(
            image, range(rows, rows + image.cross_rows), range(padding, padding + size)
        )
        places.append(place)
        rows, padding = place.rows.stop, place.padding.stop
    return tuple(places)


def _neighbours(images: Images) -> list[list[Image]]:
    parts: list[list[Image]] = [[image] for image in images[:1]]
    for before, image in pairwise(images):
        if before.end == image.start:
            parts[-1].append(image)
        else:
            parts.append([image])
    return parts


def _runs(places: Sequence[ImagePlace]) -> list[list[ImagePlace]]:
    by_start = {place.image.start: place for place in places}
    runs = _neighbours([place.image for place in places])
    return [[by_start[image.start] for image in run] for run in runs]


def _aligned(rows: int, alignment: int) -> int:
    return -(-rows // alignment) * alignment


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer stores for each position: a key and a value per kv head.

    `exact`: in float32, whatever type the cache has. `divided_heads`: how many kv heads the layer
    has, where ranks divide them; so that layers fall into the same groups on each of them.
    """

    kind: CacheKind
    kv_heads: int
    key_dim: int
    value_dim: int
    divided_heads: int | None = field(default=None, kw_only=True)
    exact: ClassVar[bool] = False

    def page_shapes(self, page_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the two tensors behind the pages of the layer, without the number of pages."""
        cells = (page_tokens, self.kv_heads)
        return (*cells, self.key_dim), (*cells, self.value_dim)

    def page_elements(self, page_tokens: int) -> int:
        return sum(map(prod, self.page_shapes(page_tokens)))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with equal declarations; they share page numbers, each with its own tensors."""

    cache: LayerCache
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a model's layers fall into groups, and how many indices a page holds."""

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
        """How many rows of images a sequence may have at most, and so a step."""
        return max((kind.capacity(0) for kind in self.kinds if kind.by_image), default=0)

    @property
    def most_images(self) -> int | None:
        limits = [kind.most_images for kind in self.kinds if kind.most_images is not None]
        return min(limits, default=None)

    def capacity_pages(self, context_tokens: int) -> tuple[int, ...]:
        """Per group: the pages that a sequence of so many tokens passes through at most."""
        return tuple(-(-k.capacity(context_tokens) // self.page_tokens) for k in self.kinds)

    def held_pages(self, context_tokens: int, in_flight: int) -> tuple[int, ...]:
        """Per group: the pages that a sequence holds at once, `in_flight` positions unconfirmed."""
        whole = self.capacity_pages(context_tokens)
        return tuple(
            min(pages, _pages_touched(kind.reach(context_tokens) - 1 + in_flight, self.page_tokens))
            for kind, pages in zip(self.kinds, whole, strict=True)
        )


def _pages_touched(indices: int, page_tokens: int) -> int:
    """By so many indices in a row, wherever they begin."""
    return -(-(indices - 1) // page_tokens) + 1 if indices > 0 else 0
