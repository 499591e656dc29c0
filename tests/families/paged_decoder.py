"""A decoder with a small paged cache, fed sequence by sequence, for comparing logits."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from runtime.engine.request import ImageSpan
from runtime.kernels.cache_rows import decode_rows, encode_rows
from runtime.kv.cache_kinds import CacheKind
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import KVPool
from runtime.vision.image_rows import axes_of
from runtime.worker.model import AttentionPlan, Batch, DecoderModel, ImageWrite, RowSpan

PAGE_TOKENS = 8
CPU = torch.device("cpu")


class PagedDecoder:
    """Pages are in shuffled order, and unwritten cells hold garbage, which must not matter."""

    def __init__(
        self,
        decoder: DecoderModel,
        *,
        slots: int = 2,
        pages_per_sequence: int = 16,
        type: CacheType = CacheType.FLOAT32,
        device: torch.device = CPU,
    ) -> None:
        self._decoder, self._device = decoder, device
        self._layout = CacheLayout.of(decoder.cache_layers, page_tokens=PAGE_TOKENS)
        widths = self._layout.capacity_pages(pages_per_sequence * PAGE_TOKENS)
        self.cache = KVPool(
            self._layout,
            pages=[slots * width for width in widths],
            slots=slots,
            pages_per_sequence=pages_per_sequence,
            type=type,
            device=device,
        )
        generator = torch.Generator().manual_seed(0)
        for table in self.cache.page_tables:
            table.copy_(torch.randperm(table.numel(), generator=generator).view(slots, -1))
        for layer in range(len(decoder.cache_layers)):
            pages = self.cache.layer(layer)
            for part in (pages.keys, pages.values):
                part.fill_(255 if pages.type.quantized else 400)  # 255: blocks of NaN
        self._lengths = [0] * slots
        self._images: list[tuple[ImageSpan, ...]] = [()] * slots
        self._features: dict[bytes, Tensor] = {}

    def show(self, slot: int, images: Sequence[tuple[ImageSpan, Tensor]]) -> None:
        """All images of the sequence in `slot`, before its first tokens are fed.

        Each with the features [rows, width] of its digest, those of padding last. They go to cross
        attention where the span says so, else into the text.
        """
        assert self._lengths[slot] == 0
        self._images[slot] = tuple(span for span, _ in images)
        self._features |= {span.digest: features for span, features in images}

    def skip(self, slot: int, positions: int) -> None:
        """The next token of the slot has a later position; no row may see those before."""
        self._lengths[slot] += positions

    def keys(self, slot: int, layer: int) -> Tensor:
        """[positions, kv_heads, key_dim] of all pages of a slot, float32."""
        pages = self.cache.layer(layer)
        stored = pages.keys[self.cache.page_tables[pages.group][slot].long()]
        return decode_rows(stored, pages.type, pages.dims[0]).flatten(0, 1)

    def drop(self, slot: int, begin: int, end: int, move: Callable[[int, Tensor], Tensor]) -> None:
        """The positions [begin, end) leave; `move` of a layer makes keys of those behind."""
        for layer in range(len(self._decoder.cache_layers)):
            pages = self.cache.layer(layer)
            table = self.cache.page_tables[pages.group][slot].long()
            behind = move(layer, self.keys(slot, layer)[end:])
            for part, rows in (
                (pages.keys, encode_rows(behind, pages.type)),
                (pages.values, pages.values[table].flatten(0, 1)[end:]),
            ):
                cells = part[table].flatten(0, 1)
                cells[begin : begin + len(rows)] = rows
                part[table] = cells.view(len(table), PAGE_TOKENS, *cells.shape[1:])
        self._lengths[slot] -= end - begin

    def feed(
        self, tokens: Mapping[int, Sequence[int]], *, outputs: Sequence[int] | None = None
    ) -> Tensor:
        """Each slot's next tokens, in one batch -> logits [outputs, vocabulary].

        `outputs`: rows of the batch, all of them by default.
        """
        with torch.inference_mode():
            return self._decoder.logits(self.states(tokens, outputs=outputs))

    def states(
        self, tokens: Mapping[int, Sequence[int]], *, outputs: Sequence[int] | None = None
    ) -> Tensor:
        """The same, but hidden states [outputs, hidden_size]."""
        batch = self.batch(tokens, outputs=outputs)
        for slot, some in tokens.items():
            self._lengths[slot] += len(some)
        with torch.inference_mode():
            return self._decoder.states(batch, self.cache)

    def batch(
        self, tokens: Mapping[int, Sequence[int]], *, outputs: Sequence[int] | None = None
    ) -> Batch:
        spans: list[RowSpan] = []
        for slot, some in tokens.items():
            begin = spans[-1].end if spans else 0
            spans.append(RowSpan(begin, begin + len(some), slot, self._lengths[slot]))
        flat = [token for some in tokens.values() for token in some]
        positions = [p for s in spans for p in range(s.start, s.start + s.end - s.begin)]
        plans = tuple(
            self._plan(kind, table, spans)
            for kind, table in zip(self._layout.kinds, self.cache.page_tables, strict=True)
        )
        rows = range(len(flat)) if outputs is None else outputs
        image_rows, inserted = self._inserted(spans)
        return Batch(
            torch.tensor(flat),
            torch.tensor(positions),
            torch.tensor(list(rows), dtype=torch.int64),
            plans,
            self._image_features(plans),
            image_rows,
            inserted,
            self._axes(spans) if self._decoder.position_axes > 1 else None,
        ).to(self._device)

    def _plan(self, kind: CacheKind, table: Tensor, spans: Sequence[RowSpan]) -> AttentionPlan:
        begins: list[int] = []
        ends: list[int] = []
        slots: list[int] = []
        bounded: list[RowSpan] = []
        for span in spans:
            stop = span.start + span.end - span.begin
            first, last = kind.seen(span.start, stop, self._images[span.slot])
            bounded.append(span._replace(seen_begin=min(first), seen_end=max(last)))
            begins, ends = begins + first, ends + last
            slots += [span.slot] * len(first)
        cells, writes, after = self._written(kind, table, spans)
        return AttentionPlan(
            page_table=table,
            row_slot=torch.tensor(slots, dtype=torch.int32),
            visible_begin=torch.tensor(begins, dtype=torch.int32),
            visible_end=torch.tensor(ends, dtype=torch.int32),
            write_cell=torch.tensor(cells, dtype=torch.int64),
            spans=tuple(bounded),
            image_writes=writes,
            after_image=after,
        )

    def _written(
        self, kind: CacheKind, table: Tensor, spans: Sequence[RowSpan]
    ) -> tuple[list[int], tuple[ImageWrite, ...], Tensor | None]:
        """The cells that rows and images write, and which rows come after an image."""
        cells: list[int] = []
        after: list[bool] = []
        writes: list[ImageWrite] = []
        for span in spans:
            positions = range(span.start, span.start + span.end - span.begin)
            images = [image for image in self._images[span.slot] if image.cross_rows]
            after += [any(image.start <= position for image in images) for position in positions]
            if kind.by_sequence:
                cells += [int(table[span.slot, 0])] * len(positions)
            elif not kind.by_image:
                cells += _cells(table[span.slot], positions)
            for place in kind.filled_images(
                positions.start, positions.stop, self._images[span.slot]
            ):
                begin = len(cells)
                cells += _cells(table[span.slot], [*place.rows, *place.padding])
                writes.append(ImageWrite(place.image.digest, begin, len(cells)))
        return cells, tuple(writes), torch.tensor(after) if kind.by_image else None

    def _inserted(self, spans: Sequence[RowSpan]) -> tuple[Tensor | None, Tensor | None]:
        """Rows of the batch whose embeddings are replaced, and the features that replace them."""
        rows: list[int] = []
        features: list[Tensor] = []
        for span in spans:
            for image in self._images[span.slot]:
                absent = image.cross_rows or not len(self._features[image.digest])
                for position in range(image.start, 0 if absent else image.end):
                    row = span.begin + position - span.start
                    if span.begin <= row < span.end:
                        rows.append(row)
                        first = image.first_row + position - image.start
                        features.append(self._features[image.digest][first])
        return (torch.tensor(rows), torch.stack(features)) if rows else (None, None)

    def _axes(self, spans: Sequence[RowSpan]) -> Tensor:
        axes = self._decoder.position_axes
        stops = [span.start + span.end - span.begin for span in spans]
        parts = [
            axes_of(self._images[span.slot], span.start, stop, axes)
            for span, stop in zip(spans, stops, strict=True)
        ]
        return torch.cat([torch.from_numpy(part) for part in parts], dim=1).long()

    def _image_features(self, plans: Sequence[AttentionPlan]) -> tuple[Tensor, ...]:
        writes = next((plan.image_writes for plan in plans if plan.image_writes), ())
        return tuple(self._features[write.digest][: write.end - write.begin] for write in writes)


def _cells(table: Tensor, indices: Sequence[int]) -> list[int]:
    """The cells of `indices` in the pages of one slot."""
    pages = table.tolist()
    return [pages[index // PAGE_TOKENS] * PAGE_TOKENS + index % PAGE_TOKENS for index in indices]
