"""A pretend device that executes plans on simulated pages, and what its model sees.

No row may see a cell that does not hold what this row's own sequence has at that index.
"""

import zlib

from runtime.engine.request import ImageSpan, Sampled
from runtime.engine.step_plan import StepPlan
from runtime.kv.page_group import CopyKind
from runtime.kv.spec import CacheKind, Chunked, Cross, Sliding

VOCABULARY = 50

Row = tuple[bytes, int]


class PretendDevice:
    """Pages as lists of what each cell holds and its value, and the tokens of each slot."""

    def __init__(self, kinds: list[CacheKind], pages: list[int], size: int, slots: int) -> None:
        self.kinds, self.size = kinds, size
        self.memory = [[[None] * size for _ in range(count)] for count in pages]
        self.host: list[dict[int, list]] = [{} for _ in kinds]
        self.tables: list[list[dict[int, int]]] = [[{} for _ in range(slots)] for _ in kinds]
        self.tokens: list[dict[int, int]] = [{} for _ in range(slots)]
        self.filled: set[tuple[object, ...]] = set()
        self.copied = 0

    def execute(self, plan: StepPlan) -> tuple[Sampled | None, ...]:
        for write in plan.page_writes:
            self.tables[write.group][write.slot][write.index] = write.page
        for group, source, target, kind, count in plan.page_copies:
            self.copied += kind is CopyKind.ON_DEVICE and count is None
            sources = self.host if kind is CopyKind.FROM_HOST else self.memory
            targets = self.host if kind is CopyKind.TO_HOST else self.memory
            cells = list(sources[group][source])
            if count is not None:
                cells[count:] = targets[group][target][count:]
            targets[group][target] = cells
        for group, page, first, by in plan.key_shifts:
            cells = self.memory[group][page]
            cells[first:] = [cell and (cell[0] + by, cell[1]) for cell in cells[first:]]
        for load in plan.slot_loads:
            self.tokens[load.slot] = dict(enumerate(load.tokens))
        for chunk in plan.proposals:
            self.tokens[chunk.slot].update(enumerate(chunk.known, chunk.start))
        rows = [self._embed(chunk) for chunk in plan.chunks]
        for group, kind in enumerate(self.kinds):
            for chunk, x in zip(plan.chunks, rows, strict=True):
                if isinstance(kind, Cross):
                    self._fill_images(group, kind, chunk)
                else:
                    self._fill_positions(group, chunk, x)
            rows = [
                self._attend(group, kind, chunk, x)
                for chunk, x in zip(plan.chunks, rows, strict=True)
            ]
        results: list[Sampled | None] = []
        for chunk, x in zip(plan.chunks, rows, strict=True):
            token = self._drawn(x[-1])
            if chunk.samples:
                self.tokens[chunk.slot][chunk.start + chunk.length] = token
            results.append(Sampled(token) if chunk.samples else None)
        return tuple(results)

    def _drawn(self, x: int) -> int:
        return x % VOCABULARY

    def _embed(self, chunk) -> list[int]:
        sequence = chunk.sequence
        places = range(chunk.start, chunk.start + chunk.length)
        tokens = [self.tokens[chunk.slot][place] for place in places]
        if chunk.feedback:
            assert chunk.length == 1 and not chunk.known
        else:
            assert tokens == list(chunk.known), "the slot has other tokens"
        if chunk.epoch == sequence.epoch and not chunk.proposed:  # penalties read those before
            for place, token in enumerate(sequence.tokens[: chunk.start]):
                assert self.tokens[chunk.slot][place] == token, "the slot had other tokens"
        padded = [0] * chunk.start + tokens
        return [
            mix("e", identity(sequence.spans, padded, i))
            for i in range(chunk.start, chunk.start + chunk.length)
        ]

    def _fill_positions(self, group: int, chunk, x: list[int]) -> None:
        for position, value in enumerate(x, chunk.start):
            page, cell = self._cell(group, chunk.slot, position)
            page[cell] = (position, mix(group, value))

    def _fill_images(self, group: int, kind: Cross, chunk) -> None:
        sequence = chunk.sequence
        for place in kind.filled_images(chunk.start, chunk.start + chunk.length, sequence.spans):
            once = (group, sequence.request.id, chunk.epoch, place.image.start)
            assert once not in self.filled, "an image's rows are filled again"
            self.filled.add(once)
            named = zip(place.rows, rows_of(place.image), strict=True)
            assert len(place.padding) in (0, place.image.cross_padding)
            padding = zip(place.padding, padding_of(place.image), strict=False)
            for index, row in [*named, *padding]:
                page, cell = self._cell(group, chunk.slot, index)
                page[cell] = (row, mix(group, row))

    def _attend(self, group: int, kind: CacheKind, chunk, x: list[int]) -> list[int]:
        spans, end = chunk.sequence.spans, chunk.start + chunk.length
        begins, ends = kind.seen(chunk.start, end, spans)
        answers = []
        for offset, (begin, stop) in enumerate(zip(begins, ends, strict=True)):
            cells = [self._cell(group, chunk.slot, index) for index in range(begin, stop)]
            held = [page[cell] for page, cell in cells]
            position = chunk.start + offset
            expected = (
                visible_rows(kind, position, spans)
                if isinstance(kind, Cross)
                else list(visible(kind, position, spans))
            )
            assert sorted(what for what, _ in held) == sorted(expected)
            answers.append(mix(x[offset], *sorted(value for _, value in held)))
        return answers

    def _cell(self, group: int, slot: int, index: int):
        page = self.tables[group][slot][index // self.size]
        return self.memory[group][page], index % self.size


def mix(*values: object) -> int:
    """A number from 0 to 2**32 - 1, the same in every process (unlike ``hash`` of a string)."""
    return zlib.crc32(repr(values).encode())


def identity(spans: tuple[ImageSpan, ...], tokens: list[int], position: int) -> object:
    """What the pretend model sees at a position: a token, or a row of an image."""
    for span in spans:
        if span.start <= position < span.end:
            return (int.from_bytes(span.digest, "big"), span.first_row + position - span.start)
    return tokens[position]


def visible(kind: CacheKind, position: int, spans: tuple[ImageSpan, ...]) -> range:
    end = position
    for span in spans:
        inside = span.whole and span.start <= position < span.end
        if inside and getattr(kind, "looks_ahead", True):
            end = span.end - 1
    match kind:
        case Sliding(window):
            return range(max(0, position - window + 1), end + 1)
        case Chunked(chunk):
            return range(position // chunk * chunk, end + 1)
        case _:
            return range(end + 1)


def visible_rows(kind: Cross, position: int, spans: tuple[ImageSpan, ...]) -> list[Row]:
    """The rows of images that a position sees: those of the last run before it, up to there."""
    begun = [span for span in spans if span.start <= position]
    if not begun:
        everything = [row for s in spans for row in [*rows_of(s), *padding_of(s)]]
        return everything if kind.lead_in else []
    run = [begun[-1]]
    while len(run) < len(begun) and begun[-1 - len(run)].end == run[0].start:
        run.insert(0, begun[-1 - len(run)])
    return [row for span in run for row in rows_of(span)]


def rows_of(span: ImageSpan) -> list[Row]:
    return [(span.digest, row) for row in range(span.cross_rows)]


def padding_of(span: ImageSpan) -> list[Row]:
    return [(span.digest, -1 - row) for row in range(span.cross_padding)]
