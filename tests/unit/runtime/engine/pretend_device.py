"""A pretend device that executes plans on simulated pages, and records what its model reads.

No row may see a cell that does not hold what this row's own sequence has at that index, nor one
that a sequence of another salt has computed.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

from runtime.engine.request import GenerationRequest, ImageSpan, LateMask, Result, Sampled
from runtime.engine.step_plan import Chunk, StepPlan
from runtime.kv.cache_kinds import CacheKind, Chunked, Cross, Sliding, Symmetric
from runtime.kv.page_group import CopyKind
from tests.unit.runtime.engine.pretend_grammar import CLASSES, class_after

VOCABULARY = 50

Row = tuple[bytes, int]  # the digest of an image, and which of its rows


class Writer(NamedTuple):
    """Whose sequence has computed a cell."""

    salt: bytes
    tenant: str

    @classmethod
    def of(cls, request: GenerationRequest) -> "Writer":
        return cls(request.cache_salt, request.tenant)


class Cell(NamedTuple):
    """A position or a row of an image, and its value."""

    what: int | Row
    value: int
    writer: Writer


@dataclass(eq=False, slots=True)
class Launched:
    """A plan, and the classes of tokens that its rows may draw, None for any."""

    plan: StepPlan
    allowed: list[int | None]


class LateMasks:
    """Masks that take longer than their step, by up to three steps, with probability `often`."""

    def __init__(self, r: random.Random, often: float) -> None:
        self.r, self.often = r, often
        self.steps = self.count = 0

    def maybe(self, allowed: int) -> LateMask | None:
        if self.r.random() >= self.often:
            return None
        self.count += 1
        until = self.steps + self.r.randint(0, 3)
        return LateMask(lambda: self.steps >= until, allowed)


class PretendDevice:
    """Pages as lists of cells, and the tokens of each slot: a runner, which computes a step when
    its results are collected. `late`: None, if no mask is late.

    `copied`: whole pages; `shared`: chunks that saw what another tenant has computed; `masked`:
    tokens that a grammar restricted.
    """

    def __init__(
        self,
        kinds: list[CacheKind],
        pages: list[int],
        size: int,
        slots: int,
        late: LateMasks | None = None,
    ) -> None:
        self.kinds, self.size, self.late = kinds, size, late
        self.memory = [[[None] * size for _ in range(count)] for count in pages]
        self.host: list[dict[int, list]] = [{} for _ in kinds]
        self.tables: list[list[dict[int, int]]] = [[{} for _ in range(slots)] for _ in kinds]
        self.tokens: list[dict[int, int]] = [{} for _ in range(slots)]
        self.filled: set[tuple[object, ...]] = set()
        self.copied = self.shared = self.masked = 0

    def launch(self, plan: StepPlan) -> Launched:
        return Launched(plan, allowed_classes(plan))

    def collect(self, launched: Launched) -> tuple[Result, ...]:
        plan = launched.plan
        self._prepare(plan)
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
        return self._sample(launched, [x[-1] for x in rows])

    def _prepare(self, plan: StepPlan) -> None:
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
            cells[first:] = [cell and cell._replace(what=cell.what + by) for cell in cells[first:]]
        for load in plan.slot_loads:
            self.tokens[load.slot] = dict(enumerate(load.tokens))
        for chunk in plan.proposals:
            self.tokens[chunk.slot].update(enumerate(chunk.known, chunk.start))

    def _sample(self, launched: Launched, states: list[int]) -> tuple[Result, ...]:
        """Masks are computed beside the step, at any time until now."""
        plan, allowed = launched.plan, launched.allowed
        assert allowed == allowed_classes(plan), "a matcher has changed during the step"
        results: list[Result] = []
        masks = self._late_masks(launched)
        for chunk, x, of_class in zip(plan.chunks, states, allowed, strict=True):
            if not chunk.samples:
                results.append(None)
                continue
            late = masks.get(chunk.sequence)
            token = self._drawn(x, of_class if late is None else None)
            self.tokens[chunk.slot][chunk.start + chunk.length] = token
            self.masked += of_class is not None and late is None
            results.append(Sampled(token) if late is None else late)
        return tuple(results)

    def _late_masks(self, launched: Launched) -> dict[object, LateMask]:
        """Those of whole sequences, but not of all of a step with nothing else."""
        if self.late is None:
            return {}
        self.late.steps += 1
        found: dict[object, LateMask] = {}
        for chunk, allowed in zip(launched.plan.chunks, launched.allowed, strict=True):
            if allowed is None or chunk.proposed:
                continue
            known = chunk.sequence.late_mask
            late = self.late.maybe(allowed) if known is None else known
            if late is not None and not late.ready():
                found[chunk.sequence] = late
        if len(found) == len({chunk.sequence for chunk in launched.plan.chunks}):
            found.popitem()
        return found

    def _drawn(self, x: int, allowed: int | None) -> int:
        return draw(x, allowed)

    def _request(self, chunk: Chunk) -> GenerationRequest:
        """What the chunk is computed for."""
        return chunk.sequence.request

    def _embed(self, chunk: Chunk) -> list[int]:
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
        return [mix(identity(sequence.spans, padded, place)) for place in places]

    def _fill_positions(self, group: int, chunk: Chunk, x: list[int]) -> None:
        writer = Writer.of(self._request(chunk))
        for position, value in enumerate(x, chunk.start):
            self._store(group, chunk.slot, position, Cell(position, mix(group, value), writer))

    def _fill_images(self, group: int, kind: Cross, chunk: Chunk) -> None:
        sequence, writer = chunk.sequence, Writer.of(self._request(chunk))
        for place in kind.filled_images(chunk.start, chunk.start + chunk.length, sequence.spans):
            once = (group, sequence.request.id, chunk.epoch, place.image.start)
            again = sequence.late_mask is not None  # its last position is computed again
            assert again or once not in self.filled, "an image's rows are filled again"
            self.filled.add(once)
            named = zip(place.rows, rows_of(place.image), strict=True)
            assert len(place.padding) in (0, place.image.cross_padding)
            padding = zip(place.padding, padding_of(place.image), strict=False)
            for index, row in [*named, *padding]:
                self._store(group, chunk.slot, index, Cell(row, mix(group, number_of(row)), writer))

    def _attend(self, group: int, kind: CacheKind, chunk: Chunk, x: list[int]) -> list[int]:
        spans, end = chunk.sequence.spans, chunk.start + chunk.length
        begins, ends = kind.seen(chunk.start, end, spans)
        answers, writers = [], set[Writer]()
        for offset, (begin, stop) in enumerate(zip(begins, ends, strict=True)):
            held = self._cells(group, chunk.slot, begin, stop)
            writers |= {cell.writer for cell in held}
            position = chunk.start + offset
            expected = (
                visible_rows(kind, position, spans)
                if isinstance(kind, Cross)
                else list(visible(kind, position, spans))
            )
            assert sorted([cell.what for cell in held]) == sorted(expected)
            answers.append(mix(x[offset], *sorted([cell.value for cell in held])))
        own = Writer.of(self._request(chunk))
        assert all(salt == own.salt for salt, _ in writers), "pages of another salt"
        self.shared += any(tenant != own.tenant for _, tenant in writers)
        return answers

    def _cells(self, group: int, slot: int, begin: int, end: int) -> list[Cell]:
        table, memory, size = self.tables[group][slot], self.memory[group], self.size
        return [memory[table[index // size]][index % size] for index in range(begin, end)]

    def _store(self, group: int, slot: int, index: int, cell: Cell) -> None:
        page = self.tables[group][slot][index // self.size]
        self.memory[group][page][index % self.size] = cell


def allowed_classes(plan: StepPlan) -> list[int | None]:
    """For each row that draws with a grammar, what its matcher allows now: after the proposed
    tokens before it too, as far as those follow the grammar. A late mask is that of one row."""
    found: list[int | None] = []
    for chunk in plan.chunks:
        matcher, late, allowed = chunk.sequence.matcher, chunk.sequence.late_mask, None
        if late is not None:
            allowed = late.mask if chunk.samples else None
        elif chunk.proposed:
            before, (token,) = found[-1], chunk.known
            if before is not None and token % CLASSES == before:
                allowed = class_after(before, token)
        elif chunk.samples and matcher is not None:
            allowed = matcher.allowed_class
        found.append(allowed)
    return found


def draw(x: int, allowed: int | None) -> int:
    """The token that follows from the last row's value, of a class if only that is allowed."""
    if allowed is None:
        return x % VOCABULARY
    return x % (VOCABULARY // CLASSES) * CLASSES + allowed


def mix(*values: int) -> int:
    """A number from 0 to 2**32 - 1, the same in every process: hashes of integers are not salted,
    but those of -1 and -2 are equal."""
    return hash(values) & 0xFFFFFFFF


def identity(spans: tuple[ImageSpan, ...], tokens: list[int], position: int) -> int:
    """What the pretend model sees at a position: a token, or a row of an image."""
    for span in spans:
        if span.start <= position < span.end:
            return number_of((span.digest, span.first_row + position - span.start))
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
        case Symmetric(distance):
            return range(max(0, position - distance), min(end, position + distance) + 1)
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


def number_of(row: Row) -> int:
    """Greater than every token."""
    digest, place = row
    return int.from_bytes(digest, "big") << 16 | place & 0xFFFF
