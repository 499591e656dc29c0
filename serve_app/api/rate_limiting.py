"""Applies the limits of tenants to HTTP: 429 with Retry-After, `x-ratelimit-*` headers, token
counts.
"""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.access import key_of
from serve_app.api.auth import needs_no_key
from serve_app.api.error_bodies import error_response
from serve_app.api.limits import Bucket, Limiter, ReachedLimit, TenantLimits
from serve_app.api.paths import route_path
from serve_app.api.refusals import RETRY_AFTER_S, Refusal
from serve_app.logs import get_logger
from serve_app.messages.tasks import ChatDelta

# OpenAI's headers, which clients and proxies read.
HEADERS = tuple(
    f"x-ratelimit-{value}-{kind}"
    for value in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)
# Requests without inference, which do not count towards the limits per minute.
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_STATE = "limits"

log = get_logger()


class LimitRequests:
    """Middleware: answers 429 to requests beyond the limits of their tenant.

    A request counts as concurrent until its response ends, fails, or the client disconnects.
    """

    def __init__(self, app: ASGIApp, limiter: Limiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or needs_no_key(route_path(scope)):
            await self._app(scope, receive, send)
            return
        tenant = scope["state"]["tenant"]
        state, reached = self._limiter.begin(tenant, counted=scope["method"] not in _READING)
        send = _with_headers(send, state)
        if reached is not None:
            if state.log_due():
                key = key_of(scope)  # without keys, the tenant is an address, which is not logged
                log.info("limit reached", client=key and key.name, limit=reached.limit)
            response = error_response(scope, _refusal(tenant, reached))
            await response(scope, receive, send)
            return
        try:
            scope["state"][_STATE] = state
            await self._app(scope, receive, send)
        finally:
            self._limiter.end(tenant)


def metered(
    deltas: AsyncGenerator[ChatDelta, None], scope: Scope
) -> AsyncGenerator[ChatDelta, None]:
    """Passes the deltas on and charges their tokens to the tenant as they arrive, so that a
    cancelled response is charged for what was generated.
    """
    state: TenantLimits | None = scope.get("state", {}).get(_STATE)
    return deltas if state is None or state.tokens is None else _charged(deltas, state)


async def _charged(
    deltas: AsyncGenerator[ChatDelta, None], state: TenantLimits
) -> AsyncGenerator[ChatDelta, None]:
    prompt = completion = charged = 0
    async with aclosing(deltas):
        async for delta in deltas:
            completion += len(delta.tokens)
            if delta.usage is not None:  # set in the first and the last delta
                prompt = delta.usage.prompt_tokens
                if delta.finish is not None:
                    completion = delta.usage.completion_tokens
            state.spend(prompt + completion - charged)
            charged = prompt + completion
            yield delta


def _refusal(tenant: str, reached: ReachedLimit) -> Refusal:
    wait_s = max(RETRY_AFTER_S, math.ceil(reached.retry_after_s))
    return Refusal(
        429,
        f"client '{tenant}' has reached its limit `{reached.limit}`; try again in {wait_s} s",
        wait_s,
        kind="tokens" if reached.limit == "tokens_per_minute" else "requests",
        code="rate_limit_exceeded",
    )


def _with_headers(send: Send, state: TenantLimits) -> Send:
    """Adds the state of the limits per minute to the response headers."""
    if state.requests is None and state.tokens is None:
        return send

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            _add_headers(headers, "requests", state.requests)
            _add_headers(headers, "tokens", state.tokens)
        await send(message)

    return sent


def _add_headers(headers: MutableHeaders, kind: str, bucket: Bucket | None) -> None:
    if bucket is not None:
        headers[f"x-ratelimit-limit-{kind}"] = str(math.floor(bucket.capacity))
        headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
        headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(bucket.full_in_s)}s"
