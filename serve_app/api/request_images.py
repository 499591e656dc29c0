"""Images of requests: turns base64 and URLs into bytes and refuses what cannot be an image.

Only the first bytes are checked here; the model replica decodes images.
"""

import asyncio
import binascii
import re
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat.recent_turns import kept_from, turn_starts
from model_zoo.images import bmp, gif, jpeg, png, webp
from runtime.errors import InvalidImageError, RequestError, TooManyImagesError
from serve_app.api.image_fetching import ImageFetcher
from serve_app.config.settings import AppSettings, ImageUrlSettings
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel

VISION = "vision"
MAX_REQUEST_BYTES = 96 * 2**20  # all images of one request, as sent to the replica
PIECE_CHARACTERS = 2**20
_MAGICS = (png.MAGIC, jpeg.MAGIC, *gif.MAGICS, bmp.MAGIC)
_DATA_URI = re.compile(r"data:(image/[\w.+-]+)?(;[\w-]+=[^;,]*)*;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Limits for images: how many per request, bytes of each, and which URLs may be fetched."""

    most: int = 16
    most_bytes: int = 16 * 2**20
    urls: ImageUrlSettings | None = None

    @classmethod
    def of(cls, settings: AppSettings) -> "ImageRules":
        return cls(settings.max_images, settings.max_image_bytes, settings.image_urls)


@dataclass(frozen=True, slots=True)
class UnreadImage:
    """An image as the request has it: base64, or a URL if `linked`. `place` names its field."""

    place: str
    text: str
    linked: bool = False


@dataclass(frozen=True, slots=True)
class UnreadMessage:
    """A message whose images have not been read yet.

    `pictured`: the content of `parts` if it has images; otherwise `parts` is complete.
    """

    parts: Message
    pictured: tuple[str | UnreadImage, ...] = ()

    @classmethod
    def of(cls, parts: Message, content: str | tuple[str | UnreadImage, ...]) -> Self:
        """`parts`: all of the message but its content."""
        if isinstance(content, str):
            return cls(replace(parts, content=content))
        return cls(parts, content)

    @property
    def images(self) -> list[UnreadImage]:
        return [part for part in self.pictured if isinstance(part, UnreadImage)]

    def message(self, images: Iterator[ImagePart]) -> Message:
        """The message with its images, which are taken from the iterator."""
        parts = (part if isinstance(part, str) else next(images) for part in self.pictured)
        return replace(self.parts, content=tuple(parts))


class ImageReader:
    """Reads the images of requests within `rules`. RequestErrors name the field and the reason."""

    def __init__(self, backend: ChatBackend, rules: ImageRules) -> None:
        self._backend = backend
        self._rules = rules
        # One thread, because decoding holds the GIL, so more threads would only wait.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")
        self._fetcher = None if rules.urls is None else ImageFetcher(rules.urls)

    def check_count(self, count: int) -> None:
        """Raises TooManyImagesError if `count` images are more than a request may have."""
        if count > self._rules.most:
            raise TooManyImagesError(
                f"the request has {count:,} images; at most {self._rules.most:,} are accepted"
            )

    def recent(self, unread: Sequence[UnreadMessage]) -> list[UnreadMessage]:
        """The messages without the oldest turns, as few as possible, if all have too many images.
        The last turn and all system messages stay."""
        roles = [each.parts.role for each in unread]
        excess = sum(len(each.images) for each in unread) - self._rules.most
        droppable = (0 if d.parts.role == "system" else len(d.images) for d in unread)
        dropped, starts = [0, *accumulate(droppable)], turn_starts(roles)
        start = next((start for start in starts if dropped[start] >= excess), starts[-1])
        return [unread[at] for at in kept_from(start, roles)]

    async def messages(
        self, model: ServedModel, unread: Sequence[UnreadMessage], *, tenant: str
    ) -> tuple[Message, ...]:
        """The messages with their images, read as by `read`."""
        wanted = [image for each in unread if each.pictured for image in each.images]
        images = iter(await self.read(model, wanted, tenant=tenant))
        return tuple([each.message(images) if each.pictured else each.parts for each in unread])

    async def read(
        self, model: ServedModel, images: Sequence[UnreadImage], *, tenant: str
    ) -> list[ImagePart]:
        """The images' bytes. Checks that need no network precede all fetches."""
        if not images:
            return []
        self.check_count(len(images))
        await self._check_vision(model, images[0].place)
        linked = {image.text: image for image in reversed(images) if image.linked}
        for image in linked.values():
            self._check_link(image)
        inline = [image for image in images if not image.linked]
        loop = asyncio.get_running_loop()
        decoded = await loop.run_in_executor(self._thread, self._decoded, inline)
        total = ImageTotal()
        total.add(sum(map(len, decoded)))
        times = Counter(image.text for image in images if image.linked)
        fetched = await _together(
            [self._fetched(each, tenant, total, times[each.text]) for each in linked.values()]
        )
        found = dict(zip(linked, fetched, strict=True))
        unlinked = iter(decoded)
        return [ImagePart(found[i.text] if i.linked else next(unlinked), i.place) for i in images]

    async def _check_vision(self, model: ServedModel, place: str) -> None:
        card = await self._backend.card(model)
        if VISION not in card.capabilities:
            raise InvalidImageError(
                place,
                f"model '{model.name}' does not support images: this model is missing data "
                "required for image input; leave them out, or choose one with the capability "
                f'"{VISION}"',
            )

    def _check_link(self, image: UnreadImage) -> None:
        if self._fetcher is None:
            raise InvalidImageError(
                image.place,
                "image URLs are not currently supported, please use base64 encoded data instead "
                f'(field "{image.place}")',
            )
        try:
            self._fetcher.check(image.text)
        except RequestError as error:
            raise InvalidImageError(image.place, f'field "{image.place}": {error}') from None

    async def _fetched(
        self, image: UnreadImage, tenant: str, total: "ImageTotal", times: int
    ) -> bytes:
        """The image at a URL, which occurs `times` times. Its parts are added to `total`."""
        assert self._fetcher is not None
        try:
            data = await self._fetcher.fetch(
                image.text, tenant=tenant, received=lambda count: total.add(times * count)
            )
        except TooManyImagesError:
            raise
        except RequestError as error:
            raise InvalidImageError(image.place, f'field "{image.place}": {error}') from None
        self._check(image.place, data)
        return data

    def _decoded(self, images: Iterable[UnreadImage]) -> list[bytes]:
        return [self._from_base64(image) for image in images]

    def _from_base64(self, image: UnreadImage) -> bytes:
        text = _plain_base64(image.text)
        self._check_size(image.place, len(text) // 4 * 3 - text[-2:].count("="))
        try:
            data = _from_base64(text)
        except ValueError as error:
            reason = f'field "{image.place}" is not base64 data: {error}'
            raise InvalidImageError(image.place, reason) from None
        self._check(image.place, data)
        return data

    def _check(self, place: str, data: bytes) -> None:
        self._check_size(place, len(data))
        if not data.startswith(_MAGICS) and not webp.is_webp(data):
            reason = f'field "{place}" is not a PNG, JPEG, WebP, GIF or BMP image'
            raise InvalidImageError(place, reason)

    def _check_size(self, place: str, size: int) -> None:
        if size > self._rules.most_bytes:
            raise InvalidImageError(
                place,
                f'field "{place}" is an image of {size:,} bytes; at most '
                f"{self._rules.most_bytes:,} are accepted. Scale it down or compress it more.",
            )


def from_url(place: str, url: str) -> UnreadImage:
    """An image from OpenAI's `image_url.url`: an address, or the image itself as a data URI."""
    if url[:5].lower() == "data:":
        head = _DATA_URI.match(url)
        if head is None:
            raise InvalidImageError(
                place,
                f'invalid image input: field "{place}" is a data URI, but does not begin with '
                '"data:image/…;base64,"',
            )
        return UnreadImage(place, url[head.end() :])
    if url[:8].lower().startswith(("http://", "https://")):
        return UnreadImage(place, url, linked=True)
    raise InvalidImageError(
        place,
        f'invalid image input: field "{place}" must be a URL that begins with "data:", "https://" '
        'or "http://"',
    )


def _plain_base64(text: str) -> str:
    """The text without line breaks, with the URL-safe alphabet and percent escapes replaced."""
    text = text.replace("\r", "").replace("\n", "")
    for character in "+/=" if "%" in text else "":
        code = f"%{ord(character):X}"
        text = text.replace(code, character).replace(code.lower(), character)
    return text.replace("-", "+").replace("_", "/")


def _from_base64(text: str) -> bytes:
    """The decoded bytes; ValueError if the text is not base64. Decodes in pieces, so that other
    threads get the GIL in between.
    """
    pieces = []
    for begin in range(0, len(text), PIECE_CHARACTERS):
        piece = binascii.a2b_base64(text[begin : begin + PIECE_CHARACTERS], strict_mode=True)
        if begin + PIECE_CHARACTERS < len(text) and len(piece) != PIECE_CHARACTERS // 4 * 3:
            raise ValueError("Excess data after padding")
        pieces.append(piece)
    return b"".join(pieces)


class ImageTotal:
    """The bytes of all images of a request. An image that occurs several times counts each time,
    because it is sent each time."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int) -> None:
        """Raises TooManyImagesError if the images have too many bytes in total."""
        self._count += count
        if self._count > MAX_REQUEST_BYTES:
            raise TooManyImagesError(
                f"the images of the request have {self._count:,} bytes together; at most "
                f"{MAX_REQUEST_BYTES:,} are accepted"
            )


async def _together(fetches: Sequence[Coroutine[None, None, bytes]]) -> list[bytes]:
    """Runs all fetches concurrently; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fetch) for fetch in fetches]
    except* RequestError as failed:
        first = failed.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first
