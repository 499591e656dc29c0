"""Embeddings of n-grams that a layer adds to each of several residual streams."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.hyper_connections import StreamSizes, stream_norm
from model_zoo.layers.state_sizes import MAX_TAPS
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.delta import short_convolution
from runtime.kernels.ngrams import MOST_TOKENS, NgramHashes, ngram_rows, token_columns
from runtime.kernels.pointwise import add_
from runtime.kernels.streams import gated_streams
from runtime.kv.states import Recurrent, StateCache

MAX_NGRAM, MAX_HEADS = 8, 1024
MOST_ROWS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class NgramSizes:
    """longest: number of tokens of the longest n-grams. heads: rows of the table for each token, of
    `dim` elements. width: taps of the convolution, `longest` tokens apart. end, image: the token
    that ends a context, and the one that stands for images."""

    longest: int
    heads: int
    dim: int
    width: int
    end: int
    image: int

    @classmethod
    def read(cls, metadata: Metadata) -> "NgramSizes":
        """ModelFileError for missing or impossible sizes."""
        longest = metadata.require_size("ple.ngram_size", at_most=MAX_NGRAM)
        if longest < 2:
            raise metadata.error("ple.ngram_size", f"is {longest}; it must be 2 or more")
        most = MAX_HEADS // (longest - 1)
        width = metadata.require_size("ple.conv_kernel", at_most=1 + MAX_TAPS // longest)
        if width < 2:
            raise metadata.error("ple.conv_kernel", f"is {width}; it must be 2 or more")
        tokens = metadata.length("tokenizer.ggml.tokens") or MOST_TOKENS
        if tokens > MOST_TOKENS:
            raise metadata.error("tokenizer.ggml.tokens", f"has more than {MOST_TOKENS:,} entries")
        end = _token(metadata, "ple.eos_token_id", None, tokens)
        return cls(
            longest,
            (longest - 1) * metadata.require_size("ple.heads_per_ngram", at_most=most),
            metadata.require_size("embedding_length_per_layer_input"),
            width,
            end,
            _token(metadata, "ple.image_token_id", end, tokens),
        )

    def cache(self, streams: StreamSizes, hidden: int) -> StateCache:
        """The last inputs of the convolution, and as a matrix the last tokens."""
        before = self.longest - 1
        taps = (self.width - 1) * self.longest
        return StateCache(Recurrent(), 1, before, before, streams.count * hidden, taps)

    def hashes(self, metadata: Metadata, device: torch.device, rows: int) -> NgramHashes:
        """ModelFileError for numbers that a table of so many rows cannot have."""
        factors, sizes, offsets = (
            _numbers(metadata, f"ple.{name}", count, least)
            for name, count, least in (
                ("layer_multipliers", self.longest, 1),
                ("head_vocab_sizes", self.heads, 1),
                ("head_offsets", self.heads, 0),
            )
        )
        tokens = metadata.length("tokenizer.ggml.tokens") or MOST_TOKENS
        if max(factors) * tokens >= 1 << 63:
            raise metadata.error("ple.layer_multipliers", f"are too large for {tokens:,} tokens")
        needed = max(size + offset for size, offset in zip(sizes, offsets, strict=True))
        if needed > rows:
            raise metadata.error("ple.head_offsets", f"need {needed:,} rows of a table of {rows:,}")
        numbers = partial(torch.tensor, device=device)
        return NgramHashes(numbers(factors), numbers(sizes), numbers(offsets), self.end)


class NgramTable:
    """The table of all n-grams: rows of the heads of each token, side by side."""

    def __init__(self, w: TensorScope, metadata: Metadata, sizes: NgramSizes) -> None:
        self.sizes = sizes
        self._rows = w.embedding("per_layer_token_embd", shape=(None, sizes.dim))
        rows = self._rows.rows or MOST_ROWS  # a missing table is reported with other tensors
        self._hashes = sizes.hashes(metadata, w.device, rows)
        self.width = sizes.heads * sizes.dim
        shift = torch.eye(sizes.longest, device=w.device).flip(0)[:, 1:]
        self._shift = shift.contiguous()

    def __call__(self, step: Step) -> Tensor:
        """[tokens, heads * dim]; `step` has the state of the layer's `NgramSizes.cache`."""
        batch, sizes = step.batch, self.sizes
        tokens = batch.tokens
        if batch.image_rows is not None:
            tokens = tokens.index_fill(0, batch.image_rows, sizes.image)
        columns = token_columns(tokens, sizes.longest - 1)
        pages = replace(step.pages, keys=step.pages.values.squeeze(1))
        before = short_convolution(columns, self._shift, pages, step.plan, curved=False)
        rows = ngram_rows(tokens, before, self._hashes)
        return self._rows(rows.flatten()).view(len(tokens), self.width)


class NgramEmbedding:
    """Adds v + silu(convolution(norm(v))) to each stream, where v is value(e) with the gate of
    `gated_streams` for the key norm(key(e)) and the query norm(stream), and e are the rows of the
    table for a token."""

    def __init__(
        self, w: TensorScope, sizes: TextSizes, streams: StreamSizes, table: NgramTable
    ) -> None:
        self._table, self._count, self._hidden = table, streams.count, sizes.hidden
        width = streams.count * sizes.hidden
        self._keys = w.linear("ple_key", shape=(width, table.width))
        self._values = w.linear("ple_value", shape=(sizes.hidden, table.width))
        self._key_norm, self._query_norm, self._conv_norm = (
            stream_norm(w, f"ple_norm_{name}", sizes, streams.count)
            for name in ("key", "query", "conv")
        )
        taps = w.table("ple_conv1d.weight", shape=(width, table.sizes.width)).t()
        apart = table.sizes.longest
        weight = taps.new_zeros((len(taps) - 1) * apart + 1, width)
        weight[::apart] = taps  # a convolution with gaps
        self._convolution = weight
        self.row_elements = 8 * width + 3 * table.width + 4 * sizes.hidden
        self.matrix_elements = width * table.width

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, streams, hidden], overwritten -> the same shape."""
        embedded = self._table(step)
        keys = self._key_norm(self._keys(embedded).view(x.shape))
        values = gated_streams(keys, self._query_norm(x), self._values(embedded))
        del keys
        inputs = self._conv_norm(values).flatten(1)
        local = short_convolution(inputs, self._convolution, step.pages, step.plan)
        add_(add_(x.flatten(1), values.flatten(1)), local)
        return x


def _token(metadata: Metadata, key: str, default: int | None, tokens: int) -> int:
    stated = metadata.require(key, int) if default is None else metadata.get(key, int, default)
    if not 0 <= stated < tokens:
        raise metadata.error(key, f"is {stated:,}; there are {tokens:,} tokens")
    return stated


def _numbers(metadata: Metadata, key: str, count: int, least: int) -> tuple[int, ...]:
    """`count` numbers of an array, of `least` or more."""
    numbers = metadata.require_array(key, int)[:count]
    if len(numbers) < count:
        raise metadata.error(key, f"has {len(numbers):,} entries; {count:,} are needed")
    if min(numbers) < least:
        raise metadata.error(key, f"has numbers below {least}")
    return numbers
