"""A decoder with a small paged cache, fed sequence by sequence, for comparing logits."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.kv.pool import KVPool
from runtime.kv.spec import CacheLayout
from runtime.model import AttentionPlan, Batch, DecoderModel, RowSpan

PAGE_TOKENS = 8


class PagedDecoder:
    """Pages lie in a shuffled order, and unwritten cells hold garbage that nobody may see."""

    def __init__(
        self,
        decoder: DecoderModel,
        *,
        slots: int = 2,
        pages_per_sequence: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._decoder = decoder
        self._layout = CacheLayout.of(decoder.cache_layers, page_tokens=PAGE_TOKENS)
        count = slots * pages_per_sequence
        self.cache = KVPool(
            self._layout,
            pages=[count] * len(self._layout.groups),
            slots=slots,
            pages_per_sequence=pages_per_sequence,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        generator = torch.Generator().manual_seed(0)
        for table in self.cache.page_tables:
            table.copy_(torch.randperm(count, generator=generator).view(slots, -1))
        for layer in range(len(decoder.cache_layers)):
            self.cache.layer(layer).keys.fill_(1e4)
            self.cache.layer(layer).values.fill_(1e4)
        self._lengths = [0] * slots

    def feed(
        self, tokens: Mapping[int, Sequence[int]], *, outputs: Sequence[int] | None = None
    ) -> Tensor:
        """Each slot's next tokens, in one batch -> logits [outputs, vocabulary].

        `outputs`: rows of the batch, all of them by default.
        """
        batch = self.batch(tokens, outputs=outputs)
        for slot, some in tokens.items():
            self._lengths[slot] += len(some)
        with torch.inference_mode():
            return self._decoder.forward(batch, self.cache)

    def batch(
        self, tokens: Mapping[int, Sequence[int]], *, outputs: Sequence[int] | None = None
    ) -> Batch:
        spans, positions, slots = [], [], []
        for slot, some in tokens.items():
            begin, start = len(positions), self._lengths[slot]
            spans.append(RowSpan(begin, begin + len(some), slot, start))
            positions += range(start, start + len(some))
            slots += [slot] * len(some)
        flat = [token for some in tokens.values() for token in some]
        rows = range(len(flat)) if outputs is None else outputs
        where, row_slot = torch.tensor(positions), torch.tensor(slots)
        plans = tuple(
            self._plan(group, where, row_slot, tuple(spans))
            for group in range(len(self._layout.groups))
        )
        output_rows = torch.tensor(list(rows), dtype=torch.int64)
        return Batch(torch.tensor(flat), where, output_rows, plans)

    def _plan(
        self, group: int, positions: Tensor, row_slot: Tensor, spans: tuple[RowSpan, ...]
    ) -> AttentionPlan:
        kind = self._layout.groups[group].cache.kind
        table = self.cache.page_tables[group]
        first = [kind.first_visible(position) for position in positions.tolist()]
        pages = table[row_slot, positions // PAGE_TOKENS].long()
        return AttentionPlan(
            page_table=table,
            row_slot=row_slot.int(),
            visible_begin=torch.tensor(first, dtype=torch.int32),
            visible_end=(positions + 1).int(),
            write_cell=pages * PAGE_TOKENS + positions % PAGE_TOKENS,
            spans=spans,
        )
