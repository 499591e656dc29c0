"""The cache of recurrent layers: one state per sequence, overwritten by every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from runtime.kv.cache_kinds import ImagePlace, Images
from runtime.kv.cache_layout import LayerCache


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A sequence has one page, index 0, with its current state.

    Steps run in order; each continues from the state of the previous one, and a step at position 0
    starts from zeros. The state belongs to one length of the sequence, so only a copy of it can
    serve as a prefix (runtime/kv/checkpoints.py).
    """

    by_image: ClassVar[bool] = False
    by_sequence: ClassVar[bool] = True
    most_images: ClassVar[int | None] = None
    alignment: ClassVar[int] = 0

    def first_visible(self, position: int, images: Images = ()) -> int:
        return 0

    def seen(self, start: int, end: int, images: Images = ()) -> tuple[list[int], list[int]]:
        """Index 0, the state of earlier steps; nothing for a step at position 0."""
        return [0] * (end - start), [min(start, 1)] * (end - start)

    def seen_by(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        return [0] * len(positions), [min(each, 1) for each in positions]

    def extent(self, end: int, images: Images = ()) -> int:
        return min(end, 1)

    def filled_images(self, start: int, end: int, images: Images = ()) -> tuple[ImagePlace, ...]:
        return ()

    def capacity(self, context_tokens: int) -> int:
        return 1

    def reach(self, context_tokens: int) -> int:
        return 1

    def pages_at_once(
        self, start: int, end: int, *, in_flight: int, page_tokens: int, images: Images = ()
    ) -> int:
        return 1

    def content(self, begin: int, end: int, images: Images) -> bytes | None:
        raise AssertionError("checkpoints are named by their prefix")

    def lead_in_key(self, images: Images) -> bytes:
        return b""


@dataclass(frozen=True, slots=True)
class StateCache(LayerCache):
    """One layer's state of a sequence: a matrix [key_dim, value_dim] for each of `kv_heads` heads,
    if there are any, and the last `taps` inputs of a convolution over `channels` channels.

    Always float32, because rounding errors of a state accumulate.
    """

    channels: int
    taps: int
    exact: ClassVar[bool] = True

    @classmethod
    def of_inputs(cls, channels: int, taps: int) -> "StateCache":
        """The state of a layer that keeps nothing but inputs."""
        return cls(Recurrent(), 0, 0, 0, channels, taps)

    def page_shapes(self, page_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.taps, self.channels), (self.kv_heads, self.key_dim, self.value_dim)
