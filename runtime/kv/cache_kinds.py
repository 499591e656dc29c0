"""Cache kinds: which cache indices a sequence fills and its rows see, as functions of positions."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Protocol

from runtime.engine.request import ImageSpan

Images = Sequence[ImageSpan]


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """The indices of an image's rows in a group that is indexed by image rows.

    `padding` is empty if no row sees the image's padding.
    """

    image: ImageSpan
    rows: range
    padding: range


def images_within(images: Images, begin: int, end: int) -> Images:
    """The images that have one of the positions [begin, end), in order.

    `images` are disjoint and ordered by position. There may be hundreds, as some models have one
    per line of a picture, so those of a long sequence are not all read for each of its pages.
    """
    if not images or images[-1].end <= begin:
        return ()
    first = bisect_right(images, begin, key=attrgetter("end"))
    return images[first : bisect_left(images, end, first, key=attrgetter("start"))]


class CacheKind(Protocol):
    """Which cache indices a sequence fills and its rows see, as pure functions of positions.

    A sequence fills the indices 0, 1, ... of each group: with its positions; if the kind is
    `by_image`, with the rows of its images; if it is `by_sequence`, only index 0, which every step
    overwrites (runtime/kv/states.py). `images`: the sequence's images, ordered by position.
    `most_images`: their maximum number, None for any. `alignment`: a multiple of the page size.
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
        """Begin and end of the indices that each row at positions [start, end) sees."""

    def seen_by(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """`seen` for rows at any positions of sequences without images."""

    def extent(self, end: int, images: Images = ()) -> int:
        """One more than the last index that the rows before `end` fill."""

    def filled_images(self, start: int, end: int, images: Images = ()) -> tuple[ImagePlace, ...]:
        """The images whose rows are filled by a step with the positions [start, end)."""

    def capacity(self, context_tokens: int) -> int:
        """The largest extent of a sequence of `context_tokens` tokens."""

    def reach(self, context_tokens: int) -> int:
        """The largest number of indices from the first visible one to the extent."""

    def pages_at_once(
        self, start: int, end: int, *, in_flight: int, page_tokens: int, images: Images = ()
    ) -> int:
        """An upper bound on the pages that a sequence holds at once while its positions [start,
        end) are computed, at most `in_flight` of them in a step."""

    def content(self, begin: int, end: int, images: Images) -> bytes | None:
        """Identifies the content of the indices [begin, end); None if the tokens determine it."""

    def lead_in_key(self, images: Images) -> bytes:
        """Identifies the images that rows before the first image see; part of every prefix."""


class _Positions:
    """Methods shared by the kinds that are indexed by position."""

    __slots__ = ()
    looks_ahead = True
    by_image = by_sequence = False
    most_images = None
    alignment = 0

    def first_visible(self, position: int, images: Images = ()) -> int:
        raise NotImplementedError

    def seen(self, start: int, end: int, images: Images = ()) -> tuple[list[int], list[int]]:
        """Each row sees positions up to its own; if the kind looks ahead, rows of a whole image see
        positions up to the end of the image."""
        first, last = self.first_visible(start), self.first_visible(end - 1)
        if first == last:  # first_visible is monotonic, so it is constant in between
            begins = [first] * (end - start)
        else:
            begins = [self.first_visible(position) for position in range(start, end)]
        ends = list(range(start + 1, end + 1))
        for image in images_within(images, start, end) if self.looks_ahead else ():
            if image.whole:
                assert image.end <= end, "a step ends inside a whole image"
                inside = range(max(image.start, start), image.end)
                ends[inside.start - start : inside.stop - start] = [image.end] * len(inside)
        return begins, ends

    def seen_by(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        return [self.first_visible(each) for each in positions], [each + 1 for each in positions]

    def extent(self, end: int, images: Images = ()) -> int:
        return end

    def filled_images(self, start: int, end: int, images: Images = ()) -> tuple[ImagePlace, ...]:
        return ()

    def capacity(self, context_tokens: int) -> int:
        return context_tokens

    def reach(self, context_tokens: int) -> int:
        raise NotImplementedError

    def pages_at_once(
        self, start: int, end: int, *, in_flight: int, page_tokens: int, images: Images = ()
    ) -> int:
        return pages_touched(self.reach(end) - 1 + in_flight, page_tokens)

    def content(self, begin: int, end: int, images: Images) -> bytes | None:
        return None

    def lead_in_key(self, images: Images) -> bytes:
        return b""


@dataclass(frozen=True, slots=True)
class Full(_Positions):
    """Every row sees all positions before it; if `looks_ahead`, rows of a whole image see all of
    that image."""

    looks_ahead: bool = True

    def first_visible(self, position: int, images: Images = ()) -> int:
        return 0

    def reach(self, context_tokens: int) -> int:
        return context_tokens


@dataclass(frozen=True, slots=True)
class Sliding(_Positions):
    """Every row sees the last `window` positions, including its own; if `looks_ahead`, rows of a
    whole image also see the rest of that image."""

    window: int
    looks_ahead: bool = True

    def first_visible(self, position: int, images: Images = ()) -> int:
        return position - self.window + 1 if position >= self.window else 0

    def reach(self, context_tokens: int) -> int:
        return min(self.window, context_tokens)


@dataclass(frozen=True, slots=True)
class Symmetric(_Positions):
    """Every row sees the positions at most `distance` before it; rows of a whole image also see the
    positions of that image at most `distance` after them. A text that is encoded in one step counts
    as a whole image."""

    distance: int

    def first_visible(self, position: int, images: Images = ()) -> int:
        return max(position - self.distance, 0)

    def seen(self, start: int, end: int, images: Images = ()) -> tuple[list[int], list[int]]:
        begins, ends = _Positions.seen(self, start, end, images)
        limits = range(start + self.distance + 1, end + self.distance + 1)
        return begins, list(map(min, ends, limits))

    def reach(self, context_tokens: int) -> int:
        return min(self.distance + 1, context_tokens)


@dataclass(frozen=True, slots=True)
class Chunked(_Positions):
    """Every row sees the positions of its own chunk of `chunk` positions, up to itself."""

    chunk: int

    def first_visible(self, position: int, images: Images = ()) -> int:
        return position - position % self.chunk

    def reach(self, context_tokens: int) -> int:
        return min(self.chunk, context_tokens)


@dataclass(frozen=True, slots=True)
class Cross:
    """Rows see image rows, which are filled once, with the first placeholder of their image.

    Images with adjacent placeholders form a run. A row sees the images of the last run before it
    whose placeholders start at or before the row. A row before the first image sees nothing; with
    `lead_in` it sees all rows of all images, including padding, so all are filled at the start. A
    sequence has at most `most_images` images of at most `image_rows` rows each, padding included.
    Runs start at multiples of `alignment`, so they do not share pages.
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

    def seen_by(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        return [0] * len(positions), [0] * len(positions)

    def extent(self, end: int, images: Images = ()) -> int:
        return max((b.end for b in self._blocks(images) if b.position < end), default=0)

    def filled_images(self, start: int, end: int, images: Images = ()) -> tuple[ImagePlace, ...]:
        blocks = self._blocks(images)
        return tuple(place for b in blocks if start <= b.position < end for place in b.places)

    def capacity(self, context_tokens: int) -> int:
        return self.most_images * _aligned(self.image_rows, self.alignment)

    def reach(self, context_tokens: int) -> int:
        return self.capacity(context_tokens)

    def pages_at_once(
        self, start: int, end: int, *, in_flight: int, page_tokens: int, images: Images = ()
    ) -> int:
        """What rows see changes where images start; the last step before that reaches furthest."""
        starts = (image.start for image in images if image.cross_rows and start < image.start < end)
        held = 0
        for stop in (*starts, end):
            first = self.first_visible(stop - 1, images) // page_tokens
            extent = self.extent(min(stop - 1 + in_flight, end), images)
            held = max(held, -(-extent // page_tokens) - first)
        return held

    def content(self, begin: int, end: int, images: Images) -> bytes | None:
        for block in self._blocks(images):
            if block.begin <= begin < block.end:
                return b"%d-%d of " % (begin - block.begin, end - block.begin) + block.name
        raise AssertionError("no image has these rows")

    def lead_in_key(self, images: Images) -> bytes:
        return next((b.name for b in self._blocks(images) if b.ahead), b"")

    def _blocks(self, images: Images) -> Iterator["_Block"]:
        """Images that are filled together: those of a run, or all after a lead-in."""
        with_cross_rows = [image for image in images if image.cross_rows]
        ahead = self.lead_in and bool(with_cross_rows) and with_cross_rows[0].start > 0
        begin = 0
        for part in [with_cross_rows] if ahead else _neighbours(with_cross_rows):
            position = 0 if ahead else part[0].start
            places = _placed(part, begin, padded=ahead)
            end = begin + _aligned(places[-1].rows.stop - begin, self.alignment)
            yield _Block(position, begin, end, places)
            begin = end


@dataclass(frozen=True, slots=True)
class _Block:
    """Image rows [begin, end), which are filled with the row at `position`."""

    position: int
    begin: int
    end: int
    places: tuple[ImagePlace, ...]

    @property
    def ahead(self) -> bool:
        """Whether rows before the images see them (`lead_in`)."""
        return self.position < self.places[0].image.start

    @property
    def name(self) -> bytes:
        parts = [(p.image.digest.hex().encode(), len(p.rows), len(p.padding)) for p in self.places]
        return b",".join(b"%s:%d+%d" % part for part in parts)


def _placed(images: Images, begin: int, *, padded: bool) -> tuple[ImagePlace, ...]:
    """The places of images in order. Padding comes first, so that its pages can be released after
    the rows that see it."""
    sizes = [image.cross_padding if padded else 0 for image in images]
    places, padding, rows = [], begin, begin + sum(sizes)
    for image, size in zip(images, sizes, strict=True):
        place = ImagePlace(
            image, range(rows, rows + image.cross_rows), range(padding, padding + size)
        )
        places.append(place)
        rows, padding = place.rows.stop, place.padding.stop
    return tuple(places)


def _neighbours(images: Images) -> list[list[ImageSpan]]:
    parts: list[list[ImageSpan]] = [[image] for image in images[:1]]
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


def pages_touched(indices: int, page_tokens: int) -> int:
    """Maximum number of pages that `indices` consecutive indices touch."""
    return -(-(indices - 1) // page_tokens) + 1 if indices > 0 else 0
