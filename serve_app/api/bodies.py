"""Receives request bodies within limits of size, rate, and total memory."""

import asyncio
import string
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request

from runtime.errors import OverloadedError, RequestError
from serve_app.api.refusals import (
    BodyTooLargeError,
    ContentEncodingError,
    QuotaError,
    SlowBodyError,
)
from serve_app.api.tenant import tenant_of
from serve_app.config.settings import AppSettings

# Decoding this many values and structures takes about 10 ms and holds the GIL. Only prompts of
# token ids have that many values.
MAX_VALUES = 300_000
MAX_STRUCTURES = 32 * 1024
# A part of a body may be image data if at most this share of it is not base64: escaped line breaks.
IMAGE_NOISE = 0.05
# The first bytes of each body are not charged, so that ordinary requests are served while large
# ones have exhausted the budget.
FREE_BYTES = 64 * 1024
BUDGET_BODIES = 8
TENANT_SHARE = 4
_PLAIN = "identity"
_BASE64 = (string.ascii_letters + string.digits + "+/=-_%").encode()
_QUOTE, _COMMA, _COLON, _LIST, _OBJECT = b'",:[{'


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of request bodies.

    `max_bytes` limits one body, `max_text_bytes` its part that is not image data. `budget_bytes`
    limits the bodies that are being received or parsed in this process; by default 8 times
    `max_bytes`. One tenant may use a quarter of the budget, and always one body of `max_bytes`.

    A body must arrive with `min_bytes_per_s`; it may fall behind that by `grace_s` at most.
    """

    max_bytes: int
    max_text_bytes: int = 8 * 2**20
    budget_bytes: int | None = None
    grace_s: float = 30.0
    min_bytes_per_s: int = 64 * 1024

    @classmethod
    def of(cls, settings: AppSettings) -> "BodyLimits":
        return cls(settings.max_body_bytes, settings.max_text_bytes, settings.body_budget_bytes)

    def check_text(self, size: int) -> None:
        """Raises BodyTooLargeError if `size` bytes outside images exceed the limit."""
        if size > self.max_text_bytes:
            raise BodyTooLargeError(
                f"the request body has more than {self.max_text_bytes:,} bytes outside images "
                "(`max_text_bytes`)"
            )

    @property
    def process_bytes(self) -> int:
        return self.budget_bytes or BUDGET_BODIES * self.max_bytes

    @property
    def tenant_bytes(self) -> int:
        return max(self.process_bytes // TENANT_SHARE, self.max_bytes)


class BodyReceiver:
    """Receives the bodies of one process within `limits`. Time is the event loop's clock."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self.budget = BodyBudget(limits)

    @asynccontextmanager
    async def received(self, request: Request, *, images: bool) -> AsyncIterator[bytearray]:
        """Yields the body and charges it to the budget until the block ends. `images`: whether the
        endpoint accepts images, which `max_text_bytes` does not limit.

        Raises ContentEncodingError, BodyTooLargeError, SlowBodyError, QuotaError, OverloadedError,
        or RequestError for too many JSON values, as soon as the received part shows it.
        """
        encoding = request.headers.get("content-encoding", _PLAIN)
        if encoding.lower() != _PLAIN:
            raise ContentEncodingError(
                f"content encoding {encoding[:40]!r} is not supported; send the body uncompressed"
            )
        declared = _declared(request)
        self._check_size(declared, images)
        with self.budget.account(tenant_of(request)) as account:
            account.expect(declared)
            yield await self._receive(request, account, images)

    async def _receive(self, request: Request, account: "BudgetShare", images: bool) -> bytearray:
        limits, body, scan, text_bytes = self._limits, bytearray(), JsonScan(), 0
        try:
            async for part in in_time(request, limits):
                self._check_size(len(body) + len(part), images)
                account.hold(len(part))
                scan.add(part)
                text_bytes += 0 if _may_be_image(part) else len(part)
                limits.check_text(text_bytes)
                body += part
        except ClientDisconnect:
            raise RequestError("the request body is incomplete") from None
        return body

    def _check_size(self, size: int, images: bool) -> None:
        limits = self._limits
        if size > limits.max_bytes:
            raise BodyTooLargeError(
                f"the request body is larger than {limits.max_bytes:,} bytes (`max_body_bytes`)"
            )
        if not images:
            limits.check_text(size)


async def in_time(request: Request, limits: BodyLimits) -> AsyncGenerator[bytes, None]:
    """The parts of a body as they arrive. Raises SlowBodyError if they are slower than the limits
    allow; the time that the caller takes for a part does not count."""
    loop, parts = asyncio.get_running_loop(), request.stream()
    received, left_s = 0, limits.grace_s
    while True:
        begun_s = loop.time()
        try:
            async with asyncio.timeout(left_s):
                part = await anext(parts, None)
        except TimeoutError:
            raise SlowBodyError(
                f"the request body is too slow: after {received:,} bytes it was "
                f"{limits.grace_s:.0f} s behind {limits.min_bytes_per_s:,} bytes per second, which "
                "are required"
            ) from None
        if part is None:
            return
        received += len(part)
        left_s += len(part) / limits.min_bytes_per_s - (loop.time() - begun_s)
        left_s = min(left_s, limits.grace_s)
        yield part


class BodyBudget:
    """Counts the bytes of bodies in flight, in total and per tenant."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._total = 0
        self._by_tenant = Counter[str]()

    @property
    def held_bytes(self) -> int:
        return self._total

    @contextmanager
    def account(self, tenant: str) -> Iterator["BudgetShare"]:
        """The account of one body; its bytes are released at the end of the block."""
        account = BudgetShare(self, tenant)
        try:
            yield account
        finally:
            self._change(tenant, -account.charged_bytes)
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def take(self, tenant: str, count: int) -> None:
        self.check(tenant, count)
        self._change(tenant, count)

    def check(self, tenant: str, count: int) -> None:
        """Raises QuotaError or OverloadedError if `count` more bytes exceed the budget."""
        limits = self._limits
        if self._by_tenant[tenant] + count > limits.tenant_bytes:
            raise QuotaError(
                f"your requests have more than {limits.tenant_bytes:,} bytes of bodies in flight "
                "(`body_budget_bytes`); send fewer large ones at once"
            )
        if self._total + count > limits.process_bytes:
            raise OverloadedError(
                f"all requests have more than {limits.process_bytes:,} bytes of bodies in flight"
            )

    def _change(self, tenant: str, count: int) -> None:
        self._total += count
        self._by_tenant[tenant] += count


class BudgetShare:
    """The share of the budget that one body holds: all bytes but the first `FREE_BYTES`."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self._held = 0
        self.charged_bytes = 0

    def expect(self, count: int) -> None:
        """Raises QuotaError or OverloadedError if a body of `count` bytes exceeds the budget."""
        self._budget.check(self._tenant, max(0, count - FREE_BYTES))

    def hold(self, count: int) -> None:
        charged = max(0, self._held + count - FREE_BYTES)
        self._budget.take(self._tenant, charged - self.charged_bytes)
        self._held += count
        self.charged_bytes = charged


class JsonScan:
    """Counts the values of a JSON text part by part, without decoding it.

    Values are counted by brackets and commas outside strings, structures (lists, objects and their
    fields) by brackets and colons. The counts are exact up to the first syntax error, where
    decoding stops.
    """

    def __init__(self) -> None:
        self.values = 0
        self.structures = 0
        self._in_string = False
        self._escape = b""  # a backslash whose escaped character is in the next part

    def add(self, part: bytes) -> None:
        """Scan the next part. Raises RequestError when the text has too many values or
        structures."""
        text = self._escape + part
        backslashes = len(text) - len(text.rstrip(b"\\"))  # trailing ones
        self._escape = b"\\" if backslashes % 2 else b""
        if b'"' in text:
            if b"\\" in text:
                text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
            outside = self._outside(text)
        elif self._in_string:
            return
        else:
            outside = np.frombuffer(text, np.uint8)
        opened, commas, colons = (
            sum(int(np.count_nonzero(outside == code)) for code in group)
            for group in ((_LIST, _OBJECT), (_COMMA,), (_COLON,))
        )
        self.values += opened + commas
        self.structures += opened + colons
        if self.values > MAX_VALUES:
            raise RequestError(f"the request body has more than {MAX_VALUES:,} JSON values")
        if self.structures > MAX_STRUCTURES:
            raise RequestError(
                f"the request body has more than {MAX_STRUCTURES:,} JSON lists, objects and fields"
            )

    def _outside(self, text: bytes) -> NDArray[np.uint8]:
        """The bytes with those inside strings replaced by zero. `text` has no escaped quotes."""
        codes = np.frombuffer(text, np.uint8)
        inside = np.logical_xor.accumulate(codes == _QUOTE) ^ self._in_string
        self._in_string = bool(inside[-1]) if codes.size else self._in_string
        return codes * ~inside


def _declared(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _may_be_image(part: bytes) -> bool:
    """Whether nearly all bytes are base64 characters. A part that spans text and image may be
    classified as either; the exact sizes are checked after decoding.
    """
    return len(part.translate(None, _BASE64)) <= IMAGE_NOISE * len(part)
