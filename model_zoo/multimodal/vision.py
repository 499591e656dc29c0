"""How a model sees: from the bytes of an image to pixels, to its place in a prompt, to features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from model_zoo.images.decode import DecodingLimits, decode, size_of
from model_zoo.images.prepared import DIGEST_BYTES, ImageProcessor, Outline
from model_zoo.multimodal.image_cache import ImageCache, ImageLease
from model_zoo.multimodal.placeholders import Placeholders, positions
from model_zoo.multimodal.prompt_layout import Shown
from runtime.errors import PromptTooLongError, RequestError
from runtime.vision.encoder import PreparedImage, VisionTower


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt in order, and each of those that differ once."""

    shown: tuple[Shown, ...] = ()
    images: tuple[PreparedImage, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class VisionModel:
    """`name`: of the file with the tower's weights. `most_images`: of a sequence, where bounded."""

    tower: VisionTower
    processor: ImageProcessor
    placement: Placeholders
    name: bytes
    limits: DecodingLimits
    most_images: int | None = None

    def see(
        self, files: Sequence[bytes], *, at_most: int, lease: ImageLease | None = None
    ) -> PromptImages:
        """RequestError for what is no image, and for too many.

        Nothing is decoded where the images take more than `at_most` positions. `lease`: of the
        album that has room for their pixels, and those that have been here before; it raises where
        there is no room.
        """
        if self.most_images is not None and len(files) > self.most_images:
            raise RequestError(
                f"The conversation has {len(files):,} images; this model takes at most "
                f"{self.most_images:,}. Send fewer."
            )
        lease = lease or ImageCache().lease()
        names = self._names(files, lease.salt)
        sketched = self._sketched(files, names, at_most, lease)
        images = self._prepared(dict(zip(names, files, strict=True)), sketched, lease)
        in_order = [images[name] for name in names]
        shown = (Shown(self.placement.pieces(image), image.digest) for image in in_order)
        different = {image.digest: image for image in in_order}
        return PromptImages(tuple(shown), tuple(different.values()))

    def _names(self, files: Sequence[bytes], salt: bytes) -> list[bytes]:
        """Of each file: what the same processor makes of the same bytes has the same name, under
        the same salt."""
        settings = repr(self.processor).encode()
        named: dict[bytes, bytes] = {}
        for data in files:
            if data not in named:
                digest = blake2b(self.name, digest_size=DIGEST_BYTES, key=salt)
                digest.update(len(settings).to_bytes(8, "little") + settings)
                digest.update(data)
                named[data] = digest.digest()
        return [named[data] for data in files]

    def _sketched(
        self, files: Sequence[bytes], names: Sequence[bytes], at_most: int, lease: ImageLease
    ) -> dict[bytes, PreparedImage | Outline]:
        """What is known of each image without decoding it: all, where it has been here before."""
        known: dict[bytes, PreparedImage | Outline] = {}
        taken = 0
        for number, (data, name) in enumerate(zip(files, names, strict=True), 1):
            if name not in known:
                known[name] = lease.find(name) or self._outline(data)
            taken += positions(self.placement.pieces(known[name]))
            if taken > at_most:
                raise _too_many(number, len(files), taken, at_most)
        return known

    def _outline(self, data: bytes) -> Outline:
        return self.processor.outline(*size_of(data, self.limits))

    def _prepared(
        self,
        files: Mapping[bytes, bytes],
        sketched: Mapping[bytes, PreparedImage | Outline],
        lease: ImageLease,
    ) -> dict[bytes, PreparedImage]:
        """All by name; room is found for all that are to be made before the first is."""
        outlines = [known for known in sketched.values() if isinstance(known, Outline)]
        lease.reserve(sum(outline.nbytes for outline in outlines))
        images: dict[bytes, PreparedImage] = {}
        # Part of the images' digests, and so of the names of their features in all caches.
        tower = blake2b(self.name, key=lease.salt).digest() if lease.salt else self.name
        for name, known in sketched.items():
            if isinstance(known, Outline):
                pixels = decode(files[name], self.limits)
                known = lease.add(name, self.processor.prepare(pixels, tower=tower))
            images[name] = known
        return images


def _too_many(shown: int, images: int, taken: int, at_most: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"the input length exceeds the context length: {shown:,} of {images:,} images take "
        f"{taken:,} tokens, and {at_most:,} is the limit. Send fewer or smaller images, or raise "
        "`context_tokens`."
    )
