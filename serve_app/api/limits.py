"""Limits of tenants: concurrent requests, requests and tokens per minute. No HTTP here."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MINUTE_S = 60.0
# Tolerates rounding for a request that arrives exactly when the bucket admits it.
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one tenant. None: unlimited."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent_requests: int | None = None

    def share(self, processes: int) -> "Limits":
        """The limits for one of `processes` processes, which do not exchange their counts.

        Concurrent requests are rounded up, so that each process admits at least one.
        """
        concurrent = self.concurrent_requests
        return Limits(
            _part(self.requests_per_minute, processes),
            _part(self.tokens_per_minute, processes),
            None if concurrent is None else math.ceil(concurrent / processes),
        )


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """The limit that refuses a request, and the seconds until it admits the next one."""

    limit: str
    retry_after_s: float


class Bucket:
    """A token bucket that holds one minute's worth, at least 1, and starts full.

    Costs that become known afterwards may overdraw it. `clock` returns seconds.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.capacity = max(1.0, per_minute)
        self._per_s = per_minute / MINUTE_S
        self._clock = clock
        self._level = self.capacity
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._at) * self._per_s)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Removes `amount`; a negative amount is added."""
        self._level = min(self.capacity, self.level - amount)

    def wait_s(self, amount: float) -> float:
        """Seconds until the bucket holds `amount`."""
        missing = amount - self.level
        return missing / self._per_s if missing > EPSILON else 0.0

    @property
    def full_in_s(self) -> float:
        return self.wait_s(self.capacity)


class TenantLimits:
    """The limits of one tenant and their current use."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.concurrent_limit = limits.concurrent_requests
        self.running = 0
        self.requests = _bucket(limits.requests_per_minute, clock)
        self.tokens = _bucket(limits.tokens_per_minute, clock)
        self._clock = clock
        self._logged_at: float | None = None

    def reached(self, *, counted: bool) -> ReachedLimit | None:
        """The limit that a request would exceed now. Requests that are not `counted` are exempt
        from the limits per minute.
        """
        if self.concurrent_limit is not None and self.running >= self.concurrent_limit:
            return ReachedLimit("concurrent_requests", 0.0)
        if not counted:
            return None
        for name, bucket in (
            ("requests_per_minute", self.requests),
            ("tokens_per_minute", self.tokens),
        ):
            wait_s = 0.0 if bucket is None else bucket.wait_s(1.0)
            if wait_s:
                return ReachedLimit(name, wait_s)
        return None

    def begin(self, *, counted: bool) -> None:
        self.running += 1
        if counted and self.requests is not None:
            self.requests.take(1.0)

    def end(self) -> None:
        self.running -= 1

    def spend(self, tokens: int) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens)

    def log_due(self) -> bool:
        """Whether to log a refusal: at most one per minute."""
        now = self._clock()
        due = self._logged_at is None or now - self._logged_at >= MINUTE_S
        if due:
            self._logged_at = now
        return due

    @property
    def forgettable(self) -> bool:
        """Whether the state equals that of a new tenant."""
        return not self.running and self.requests is None and self.tokens is None


class Limiter:
    """The limits of all tenants in one of `processes` processes.

    `tenants` maps names to limits; all other tenants have `default`. States that equal a new one
    are dropped, so that clients with changing addresses use no memory.
    """

    def __init__(
        self,
        default: Limits,
        tenants: Mapping[str, Limits],
        *,
        processes: int,
        clock: Callable[[], float],
    ) -> None:
        self._default = default.share(processes)
        self._tenants = {name: limits.share(processes) for name, limits in tenants.items()}
        self._clock = clock
        self._states: dict[str, TenantLimits] = {}

    def begin(self, tenant: str, *, counted: bool) -> tuple[TenantLimits, ReachedLimit | None]:
        """The tenant's state, and the limit that refuses the request. If that is None, the request
        is admitted and `end` must follow.
        """
        state = self._states.get(tenant)
        if state is None:
            limits = self._tenants.get(tenant, self._default)
            state = self._states[tenant] = TenantLimits(limits, self._clock)
        reached = state.reached(counted=counted)
        if reached is None:
            state.begin(counted=counted)
        return state, reached

    def end(self, tenant: str) -> None:
        state = self._states[tenant]
        state.end()
        if state.forgettable:
            del self._states[tenant]


def _part(limit: float | None, processes: int) -> float | None:
    return None if limit is None else limit / processes


def _bucket(per_minute: float | None, clock: Callable[[], float]) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)
