"""The sizes of recurrent layers whose heads have a matrix as their state."""

from dataclasses import dataclass

from model_zoo.gguf.metadata import Metadata
from model_zoo.layers.text_sizes import MAX_HEAD_DIM
from runtime.kv.states import Recurrent, StateCache

MAX_HEADS, MAX_TAPS = 4096, 64


@dataclass(frozen=True, slots=True)
class StateSizes:
    """heads: number of value heads, of size `value_dim`. key_heads: number of query and key heads,
    of size `key_dim`, which value heads share. width: taps of the convolution.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    width: int

    @classmethod
    def read(cls, metadata: Metadata) -> "StateSizes":
        """Raises ModelFileError for missing or impossible sizes."""
        heads = metadata.require_size("ssm.time_step_rank", at_most=MAX_HEADS)
        key_heads = metadata.require_size("ssm.group_count", at_most=MAX_HEADS)
        inner = metadata.require_size("ssm.inner_size", at_most=MAX_HEADS * MAX_HEAD_DIM)
        for key, divisor, number in (
            ("ssm.group_count", key_heads, heads),
            ("ssm.time_step_rank", heads, inner),
        ):
            if number % divisor:
                raise metadata.error(key, f"is {divisor:,}, which does not divide {number:,}")
        return cls(
            heads,
            key_heads,
            metadata.require_size("ssm.state_size", at_most=MAX_HEAD_DIM),
            inner // heads,
            metadata.require_size("ssm.conv_kernel", at_most=MAX_TAPS),
        )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def cache(self) -> StateCache:
        """The state that a layer stores per sequence."""
        kind, taps = Recurrent(), self.width - 1
        return StateCache(kind, self.heads, self.key_dim, self.value_dim, self.channels, taps)
