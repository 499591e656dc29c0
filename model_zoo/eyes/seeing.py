"""How a model sees: from the bytes of an image to pixels, to its place in a prompt, to features."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model_zoo.images.decode import DecodingLimits, decode
from model_zoo.images.prepared import ImageProcessor
from model_zoo.placement.layout import Shown
from model_zoo.placement.pieces import Placement, positions
from runtime.errors import PromptTooLongError, RequestError
from runtime.vision import PreparedImage, VisionTower


@dataclass(frozen=True, slots=True)
class Seen:
    """The images of a prompt in order, and each of those that differ once."""

    shown: tuple[Shown, ...] = ()
    images: tuple[PreparedImage, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Eyes:
    """`name`: of the file with the tower's weights. `most_images`: of a sequence, where bounded."""

    tower: VisionTower
    processor: ImageProcessor
    placement: Placement
    name: bytes
    limits: DecodingLimits
    most_images: int | None = None

    def see(self, files: Sequence[bytes], *, at_most: int) -> Seen:
        """RequestError for what is no image, and for too many.

        No more is decoded once the images take more than `at_most` positions.
        """
        if self.most_images is not None and len(files) > self.most_images:
            raise RequestError(
                f"The conversation has {len(files):,} images; this model takes at most "
                f"{self.most_images:,}. Send fewer."
            )
        different: dict[bytes, PreparedImage] = {}
        shown: list[Shown] = []
        taken = 0
        for image in self._prepared(files):
            different.setdefault(image.digest, image)
            shown.append(Shown(self.placement.pieces(image), image.digest))
            taken += positions(shown[-1].pieces)
            if taken > at_most:
                raise _too_many(len(shown), len(files), taken, at_most)
        return Seen(tuple(shown), tuple(different.values()))

    def _prepared(self, files: Sequence[bytes]) -> Iterator[PreparedImage]:
        """One after the other, as they are asked for; a file that comes again only once."""
        known: dict[bytes, PreparedImage] = {}
        for data in files:
            if data not in known:
                known[data] = self.processor.prepare(decode(data, self.limits), tower=self.name)
            yield known[data]


def _too_many(shown: int, images: int, taken: int, at_most: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"the input length exceeds the context length: {shown:,} of {images:,} images take "
        f"{taken:,} tokens, and {at_most:,} is the limit. Send fewer or smaller images, or raise "
        "`context_tokens`."
    )
