"""What layers with a recurrence keep: one state for each sequence, written anew with every step."""

from dataclasses import dataclass
from typing import ClassVar

from runtime.kv.spec import ImagePlace, Images, LayerCache


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A sequence has one page, index 0, which sums up all that came before.

    Steps run in order, each begins where the one before ended, and one that begins at position 0
    begins with nothing. The page fits no other length of the sequence than that of its last step,
    so no prefix can be taken from it, and a preempted sequence is computed again.
    """

    by_image: ClassVar[bool] = False
    by_sequence: ClassVar[bool] = True
    most_images: ClassVar[int | None] = None
    alignment: ClassVar[int] = 0

    def first_visible(self, position: int, images: Images = ()) -> int:
        return 0

    def seen(self, start: int, end: int, images: Images = ()) -> tuple[list[int], list[int]]:
        return [0] * (end - start), [1] * (end - start)

    def extent(self, end: int, images: Images = ()) -> int:
        return min(end, 1)

    def begun(self, start: int, end: int, images: Images = ()) -> tuple[ImagePlace, ...]:
        return ()

    def capacity(self, context_tokens: int) -> int:
        return 1

    def reach(self, context_tokens: int) -> int:
        return 1

    def content(self, begin: int, end: int, images: Images) -> bytes | None:
        raise AssertionError("nobody shares a state")

    def foreseen(self, images: Images) -> bytes:
        return b""


@dataclass(frozen=True, slots=True)
class StateCache(LayerCache):
    """What one layer stores for each sequence: a matrix [key_dim, value_dim] for each of `kv_heads`
    heads, and the last `taps` inputs of `channels` channels that a convolution looks back at.

    As errors of a state stay in it, it is always in float32.
    """

    channels: int
    taps: int
    exact: ClassVar[bool] = True

    def page_shapes(self, page_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.taps, self.channels), (self.kv_heads, self.key_dim, self.value_dim)
