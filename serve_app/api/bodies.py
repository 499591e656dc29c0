"""Receiving request bodies: how large, how slow and how many of them there may be."""

import asyncio
import string
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request

from runtime.errors import OverloadedError, RequestError
from serve_app.api.refusals import BodyTooLargeError, QuotaError, SlowBodyError
from serve_app.api.tenant import tenant_of
from serve_app.config.settings import AppSettings

# Decoding takes about 10 ms for so many of each, and holds the GIL. Only prompts of token ids have
# so many values.
MAX_VALUES = 300_000
MAX_STRUCTURES = 32 * 1024
# Of a part of a body, the largest share of bytes beside base64 where the part may be an image: line
# breaks, as escapes.
IMAGE_NOISE = 0.05
# The beginning of each body that the budget does not count, so that ordinary requests are served
# while large ones have used it up.
FREE_BYTES = 64 * 1024
BUDGET_BODIES = 8
TENANT_SHARE = 4
_BASE64 = (string.ascii_letters + string.digits + "+/=-_%").encode()
_QUOTE, _COMMA, _COLON, _LIST, _OBJECT = b'",:[{'


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`max_bytes`: of one body; `max_text_bytes`: without its images. `budget_bytes`: of all bodies
    that are being received or decoded; None: 8 of the longest. One tenant gets a quarter of it, but
    at least one whole body.

    A body must come within `grace_s`, and a second more for each `min_bytes_per_s` of it.
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
        """BodyTooLargeError when a body may not have so many bytes beside images."""
        if size > self.max_text_bytes:
            raise BodyTooLargeError(
                f"the request body has more than {self.max_text_bytes:,} bytes beside images "
                "(`max_text_bytes`)"
            )

    @property
    def process_bytes(self) -> int:
        return self.budget_bytes or BUDGET_BODIES * self.max_bytes

    @property
    def tenant_bytes(self) -> int:
        return max(self.process_bytes // TENANT_SHARE, self.max_bytes)


class BodyReceiver:
    """Receives the bodies of one process within `limits`, by the clock of the event loop."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self.budget = BodyBudget(limits)

    @asynccontextmanager
    async def received(self, request: Request, *, images: bool) -> AsyncIterator[bytearray]:
        """The body, which counts as in flight until the block ends. `images`: whether it may hold
        some, and so be longer than a text.

        BodyTooLargeError, SlowBodyError, QuotaError, OverloadedError, and RequestError where it has
        too many JSON values: as soon as the part is here that shows it.
        """
        declared = _declared(request)
        self._check_size(declared, images)
        with self.budget.account(tenant_of(request)) as account:
            account.expect(declared)
            yield await self._receive(request, account, images)

    async def _receive(self, request: Request, account: "Account", images: bool) -> bytearray:
        limits, body, scan, text_bytes = self._limits, bytearray(), JsonScan(), 0
        begun_s, allowed_s = asyncio.get_running_loop().time(), limits.grace_s
        try:
            async with asyncio.timeout(limits.grace_s) as deadline:
                async for part in request.stream():
                    self._check_size(len(body) + len(part), images)
                    account.hold(len(part))
                    scan.add(part)
                    text_bytes += 0 if _may_be_image(part) else len(part)
                    limits.check_text(text_bytes)
                    body += part
                    allowed_s = limits.grace_s + len(body) / limits.min_bytes_per_s
                    deadline.reschedule(begun_s + allowed_s)
        except TimeoutError:
            raise SlowBodyError(
                f"the request body is too slow: {len(body):,} bytes came in {allowed_s:.0f} s; "
                f"after {limits.grace_s:.0f} s at least {limits.min_bytes_per_s:,} bytes a second "
                "are wanted"
            ) from None
        except ClientDisconnect:
            raise RequestError("the request body did not come whole") from None
        return body

    def _check_size(self, size: int, images: bool) -> None:
        limits = self._limits
        if size > limits.max_bytes:
            raise BodyTooLargeError(
                f"the request body is larger than {limits.max_bytes:,} bytes (`max_body_bytes`)"
            )
        if not images:
            limits.check_text(size)


class BodyBudget:
    """How many bytes of bodies this process and each tenant hold."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._total = 0
        self._by_tenant = Counter[str]()

    @property
    def held_bytes(self) -> int:
        return self._total

    @contextmanager
    def account(self, tenant: str) -> Iterator["Account"]:
        """Of one body; what it holds is released at the end of the block."""
        account = Account(self, tenant)
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
        """QuotaError or OverloadedError where there is no room for so many bytes."""
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


class Account:
    """What one body holds of the budget: all but its first `FREE_BYTES`."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self._held = 0
        self.charged_bytes = 0

    def expect(self, count: int) -> None:
        """QuotaError or OverloadedError where there is no room for a body of so many bytes now."""
        self._budget.check(self._tenant, max(0, count - FREE_BYTES))

    def hold(self, count: int) -> None:
        charged = max(0, self._held + count - FREE_BYTES)
        self._budget.take(self._tenant, charged - self.charged_bytes)
        self._held += count
        self.charged_bytes = charged


class JsonScan:
    """Counts what decoding a JSON text would make, part by part, before anything is decoded.

    Values are told by the brackets and commas outside strings, structures (lists, objects and their
    fields) by brackets and colons. The counts are exact up to the first byte that is no JSON, where
    decoding ends.
    """

    def __init__(self) -> None:
        self.values = 0
        self.structures = 0
        self._in_string = False
        self._escape = b""  # a backslash whose escaped character is in the next part

    def add(self, part: bytes) -> None:
        """RequestError when there are too many."""
        text = (self._escape + part).replace(b"\\\\", b"")
        self._escape = b"\\" if text.endswith(b"\\") else b""
        if b'"' in text:
            outside = self._outside(text.replace(b'\\"', b""))
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
        """The bytes, those in strings replaced by zero; quotes begin and end strings here."""
        codes = np.frombuffer(text, np.uint8)
        inside = np.logical_xor.accumulate(codes == _QUOTE) ^ self._in_string
        self._in_string = bool(inside[-1]) if codes.size else self._in_string
        return codes * ~inside


def _declared(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _may_be_image(part: bytes) -> bool:
    """Whether it may be from the middle of an image in base64. Where texts and images meet, a part
    may be taken for either: decoding tells them apart."""
    return len(part.translate(None, _BASE64)) <= IMAGE_NOISE * len(part)
