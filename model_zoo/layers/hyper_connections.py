"""Hyper-connections: a residual of several streams, from which each part of a layer computes its
input, and to each of which it adds its output with a weight of its own."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import Mixer, RowWise
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.experts import weighted_sum
from runtime.kernels.pointwise import (
    contiguous,
    curve_alone,
    joined,
    scale_,
    sigmoid_mul,
    silu,
    take_rows,
)
from runtime.kernels.streams import add_shares_

# More than any model has.
MAX_STREAMS, MAX_RANK = 64, 1 << 16


class Connection(Protocol):
    """What connects a part of a layer, such as attention, to the streams.

    Zhu et al., "Hyper-Connections". Variants differ in how the weights are computed, and in whether
    streams are also mixed with each other. stream_elements: elements of all streams of a row;
    row_elements, matrix_elements: as in `RowWise`.
    """

    stream_elements: int
    row_elements: int
    matrix_elements: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, streams, hidden] -> the part's input [tokens, hidden], and [tokens, n]
        weights for `connected`."""
        ...

    def connected(self, x: Tensor, output: Tensor, weights: Tensor) -> Tensor:
        """x, which may be overwritten, with the part's output [tokens, hidden]; like x."""
        ...


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """count: number of streams. rank: of the products that compute the weights of their mixture."""

    count: int
    rank: int

    @classmethod
    def read(cls, metadata: Metadata) -> "StreamSizes":
        """ModelFileError for missing or impossible sizes."""
        key = "hyper_connection.count"
        count = metadata.require_size(key, at_most=MAX_STREAMS)
        if count < 2:
            raise metadata.error(key, f"is {count}; it must be 2 or more")
        rank = metadata.require_size("hyper_connection.low_rank", at_most=MAX_RANK)
        return cls(count, rank)


def stream_norm(w: TensorScope, name: str, sizes: TextSizes, count: int) -> RMSNorm:
    """An RMS norm of each of `count` streams, x [tokens, count, hidden], with weights of its
    own."""
    weight = w.vector(name, size=count * sizes.hidden)
    return RMSNorm(weight.view(count, sizes.hidden), sizes.eps)


class StreamMixture:
    """The mean of the normed streams, each element of which is multiplied by
    sigmoid(up(silu(down(all normed streams) / count))).

    name: the prefix of its tensors.
    """

    def __init__(self, w: TensorScope, name: str, sizes: TextSizes, streams: StreamSizes) -> None:
        self._count, width = streams.count, streams.count * sizes.hidden
        self._norm = stream_norm(w, f"{name}_norm", sizes, streams.count)
        self._down = w.linear(f"{name}_down", shape=(streams.rank, width))
        self._up = w.linear(f"{name}_up", shape=(width, streams.rank))
        self.row_elements = 4 * width + 3 * streams.rank
        self.matrix_elements = width * streams.rank

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, streams, hidden] -> [tokens, hidden], and the normed streams [tokens, streams
        * hidden]."""
        normed = self._norm(x).flatten(1)
        inner = silu(scale_(self._down(normed), 1 / self._count))
        parts = sigmoid_mul(self._up(inner), normed).view(x.shape)
        return scale_(weighted_sum(parts, None), 1 / self._count), normed


class GatedConnection:
    """A part's input is the mixture of the streams, its output is added to each with the weight
    2 * sigmoid(inject(all normed streams) / count), which is 1 in the middle.

    name: the prefix of its tensors.
    """

    def __init__(self, w: TensorScope, name: str, sizes: TextSizes, streams: StreamSizes) -> None:
        self._count = streams.count
        self._mixture = StreamMixture(w, name, sizes, streams)
        shape = streams.count, streams.count * sizes.hidden
        self._inject = w.linear(f"{name}_inject", shape=shape)
        self.stream_elements = streams.count * sizes.hidden
        self.row_elements = self._mixture.row_elements
        self.matrix_elements = self._mixture.matrix_elements

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed, normed = self._mixture(x)
        weights = curve_alone(sigmoid_mul, scale_(self._inject(normed), 1 / self._count))
        return mixed, scale_(weights, 2.0)

    def connected(self, x: Tensor, output: Tensor, weights: Tensor) -> Tensor:
        return add_shares_(x, output, weights)


class CopiedStreams:
    """Streams that begin as copies of the embedding and end as their mixture."""

    def __init__(self, w: TensorScope, name: str, sizes: TextSizes, streams: StreamSizes) -> None:
        self._count = streams.count
        self._mixture = StreamMixture(w, name, sizes, streams)

    def spread(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, streams, hidden]."""
        copies = joined(*[x.unsqueeze(1)] * self._count)
        return copies.view(len(x), self._count, x.shape[1])

    def gather(self, x: Tensor) -> Tensor:
        """x [tokens, streams, hidden] -> [tokens, hidden]."""
        return self._mixture(x)[0]


@dataclass(frozen=True, slots=True, eq=False)
class ConnectedBlock:
    """Attention, then a feed-forward, each with its connection to the streams; see `LayerBlock`."""

    attention_connection: Connection
    attention: Mixer
    feed_forward_connection: Connection
    feed_forward: RowWise

    @property
    def _parts(self) -> tuple[Connection | Mixer | RowWise, ...]:
        return (
            self.attention_connection,
            self.attention,
            self.feed_forward_connection,
            self.feed_forward,
        )

    @property
    def row_elements(self) -> int:
        streams = 2 * self.attention_connection.stream_elements  # also those before `take_rows`
        return streams + max(part.row_elements for part in self._parts)

    @property
    def matrix_elements(self) -> int:
        return max(part.matrix_elements for part in self._parts)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, streams, hidden] -> the same shape, or [outputs, streams, hidden] if
        `step.rows` selects rows."""
        mixed, weights = self.attention_connection(x)
        attended = self.attention(mixed, step)
        if step.rows is not None:
            x = take_rows(x.flatten(1), step.rows).view(-1, *x.shape[1:])
            weights = take_rows(contiguous(weights), step.rows)
        x = self.attention_connection.connected(x, attended, weights)
        mixed, weights = self.feed_forward_connection(x)
        return self.feed_forward_connection.connected(x, self.feed_forward(mixed), weights)
