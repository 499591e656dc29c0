"""The contract with models: what a step hands them, and what they declare."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.kv.spec import LayerCache


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [begin, end) of the batch belong to the sequence in `slot`, positions from `start`."""

    begin: int
    end: int
    slot: int
    start: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the rows of a batch write and what they see, for one cache group.

    page_table [slots, pages per sequence] int32: the page that holds index i of a slot's sequence.
    row_slot [tokens] int32. visible_begin, visible_end [tokens] int32: row r sees the cached
    positions visible_begin[r] <= p < visible_end[r] of its slot. write_cell [tokens] int64:
    page * page_tokens + offset, where row r's key and value go. All on the model's device;
    `spans` is the same partition of rows on the host (rows of one slot are contiguous).
    """

    page_table: Tensor
    row_slot: Tensor
    visible_begin: Tensor
    visible_end: Tensor
    write_cell: Tensor
    spans: tuple[RowSpan, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input, flat over all sequences.

    tokens [tokens] int64; positions [tokens] int64; output_rows [outputs] int64: the rows whose
    logits are wanted; plans: one per cache group, in the layout's order.
    """

    tokens: Tensor
    positions: Tensor
    output_rows: Tensor
    plans: tuple[AttentionPlan, ...]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer: keys [pages, page_tokens, kv_heads, key_dim], values likewise.

    `group` is the index of its plan in `Batch.plans`.
    """

    keys: Tensor
    values: Tensor
    group: int


class KVCache(Protocol):
    """The tensors behind the pages."""

    def layer(self, index: int) -> LayerPages: ...


class DecoderModel(Protocol):
    """A text decoder.

    `cache_layers`: one declaration per layer. `forward` writes this batch's keys and values into
    `cache` and returns logits [outputs, vocab_size] in float32 for `batch.output_rows`.
    `activation_bytes(tokens, outputs)` bounds what `forward` allocates for such a batch.
    """

    vocab_size: int
    context_length: int

    @property
    def cache_layers(self) -> Sequence[LayerCache]: ...

    @property
    def weight_bytes(self) -> int: ...

    def forward(self, batch: Batch, cache: KVCache) -> Tensor: ...

    def activation_bytes(self, tokens: int, outputs: int) -> int: ...
