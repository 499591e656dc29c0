"""A model's vision: turns image files into prepared pixels and placeholders of a prompt."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import torch

from model_zoo.chat.messages import ImagePart
from model_zoo.images.decode import DecodingLimits, decode, size_of
from model_zoo.images.prepared import DIGEST_BYTES, ImageProcessor, outline_within, prepare
from model_zoo.multimodal.image_cache import ImageCache, ImageLease
from model_zoo.multimodal.placeholders import Placeholders, positions
from model_zoo.multimodal.prompt_layout import ImagePieces
from runtime.errors import InvalidImageError, PromptTooLongError, RequestError, TooManyImagesError
from runtime.vision.encoder import ImageOutline, PreparedImage, VisionTower

# Of the first image on a CPU: those of about 200 x 200 pixels in most families.
FIRST_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The placeholders of each image of a prompt in order, and the distinct images."""

    pieces: tuple[ImagePieces, ...] = ()
    images: tuple[PreparedImage, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class VisionModel:
    """`weight_bytes`: of the tower's tensors. `name`: digest of the file with the weights.
    `most_images`: limit per sequence, if any."""

    tower: VisionTower
    weight_bytes: int
    processor: ImageProcessor
    placeholders: Placeholders
    name: bytes
    limits: DecodingLimits
    most_images: int | None = None

    def first_image(self, device: torch.device, context_tokens: int) -> PreparedImage:
        """What an encoder on `device` encodes at its start, to check the shape of features.

        On a CPU a small image, since a large one may take many minutes and uses the same kernels;
        elsewhere the largest one found that fits the context, which shows that memory suffices.
        """
        rows = FIRST_ROWS if device.type == "cpu" else context_tokens
        return outline_within(self.processor, rows).blank()

    def prepare(
        self, parts: Sequence[ImagePart], *, at_most: int, lease: ImageLease | None = None
    ) -> PromptImages:
        """Decodes and prepares images; known ones are taken from the cache.

        Nothing is decoded if the images take more than `at_most` tokens. RequestError for a file
        that is not an image, with its place; TooManyImagesError for more than `most_images`.
        `lease` reserves memory for the pixels, and raises if there is too little; images that it
        has of other prompts are released.
        """
        if self.most_images is not None and len(parts) > self.most_images:
            raise TooManyImagesError(
                f"The conversation has {len(parts):,} images; this model takes at most "
                f"{self.most_images:,}. Send fewer."
            )
        lease = lease or ImageCache().lease()
        names = self._names([part.data for part in parts], lease.salt)
        lease.keep_only(names)
        known = self._known_or_outlined(parts, names, at_most, lease)
        first = dict(zip(reversed(names), reversed(parts), strict=True))
        images = self._prepared(first, known, lease)
        in_order = [images[name] for name in names]
        shown = (ImagePieces(self.placeholders.pieces(image), image.digest) for image in in_order)
        different = {image.digest: image for image in in_order}
        return PromptImages(tuple(shown), tuple(different.values()))

    def _names(self, files: Sequence[bytes], salt: bytes) -> list[bytes]:
        """Cache keys: a digest of each file's bytes, the processor's settings and the salt."""
        settings = repr(self.processor).encode()
        named: dict[bytes, bytes] = {}
        for data in files:
            if data not in named:
                digest = blake2b(self.name, digest_size=DIGEST_BYTES, key=salt)
                digest.update(len(settings).to_bytes(8, "little") + settings)
                digest.update(data)
                named[data] = digest.digest()
        return [named[data] for data in files]

    def _known_or_outlined(
        self, parts: Sequence[ImagePart], names: Sequence[bytes], at_most: int, lease: ImageLease
    ) -> dict[bytes, PreparedImage | ImageOutline]:
        """By name, the prepared image if it is cached, else its outline."""
        known: dict[bytes, PreparedImage | ImageOutline] = {}
        tokens = 0
        for number, (part, name) in enumerate(zip(parts, names, strict=True), 1):
            if name not in known:
                known[name] = lease.find(name) or self._outline(part)
            tokens += positions(self.placeholders.pieces(known[name]))
            if tokens > at_most:
                raise _too_many(number, len(parts), tokens, at_most)
        return known

    def _outline(self, part: ImagePart) -> ImageOutline:
        with _placed_errors(part):
            return self.processor.outline(*size_of(part.data, self.limits))

    def _prepared(
        self,
        parts: Mapping[bytes, ImagePart],
        known: Mapping[bytes, PreparedImage | ImageOutline],
        lease: ImageLease,
    ) -> dict[bytes, PreparedImage]:
        """All images by name; memory for all new ones is reserved before the first is decoded."""
        outlines = [image for image in known.values() if isinstance(image, ImageOutline)]
        lease.reserve(sum(outline.nbytes for outline in outlines))
        images: dict[bytes, PreparedImage] = {}
        # Part of the digests of images, and so of the keys of their features in all caches.
        tower = blake2b(self.name, key=lease.salt).digest() if lease.salt else self.name
        for name, image in known.items():
            if isinstance(image, ImageOutline):
                with _placed_errors(parts[name]):
                    pixels = decode(parts[name].data, self.limits)
                    made = prepare(pixels, self.processor, tower=tower)
                image = lease.add(name, made)
            images[name] = image
        return images


@contextmanager
def _placed_errors(part: ImagePart) -> Iterator[None]:
    """Names the image in errors about it."""
    try:
        yield
    except RequestError as error:
        place = "" if part.place is None else f'field "{part.place}": '
        raise InvalidImageError(part.place, f"{place}{error}") from None


def _too_many(shown: int, images: int, taken: int, at_most: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"the input length exceeds the context length: {shown:,} of {images:,} images take "
        f"{taken:,} tokens, and {at_most:,} is the limit. Send fewer or smaller images, or raise "
        "`context_tokens`."
    )
