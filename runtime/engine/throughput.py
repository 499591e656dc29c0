"""Recent prompt tokens per second of an engine, and the number of first tokens."""

from collections import deque

# Factor by which each step reduces the weight of the earlier ones in the speed.
MEMORY = 0.8
SECOND_NS = 1_000_000_000


class Throughput:
    """Measures steps and counts first tokens; times in nanoseconds of one clock.

    Steps that used less than half of the rows offered to them do not count: they had no more to
    compute. So this is the prefill speed under load, while other sequences decode.
    """

    def __init__(self) -> None:
        self.computed_tokens = 0
        self.first_tokens = 0
        self._launched: deque[tuple[int, bool, int]] = deque()
        self._retired_ns = 0
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Recent speed; None before the first full step."""
        return self._tokens / self._seconds if self._seconds else None

    def launch(self, chunks: list[int], now_ns: int, *, offered: int) -> None:
        """A step is launched with these tokens per sequence, of `offered` rows; a single token is
        not a prompt."""
        prompts = sum(length for length in chunks if length > 1)
        self._launched.append((now_ns, 2 * sum(chunks) >= offered, prompts))

    def retire(self, now_ns: int) -> int:
        """The oldest launched step has ended; it had the device since the previous one ended, which
        is returned in nanoseconds."""
        launched_ns, full, prompts = self._launched.popleft()
        took_ns = now_ns - max(launched_ns, self._retired_ns)
        self._retired_ns = now_ns
        self.computed_tokens += prompts
        if prompts and full and took_ns > 0:
            self._tokens = MEMORY * self._tokens + prompts
            self._seconds = MEMORY * self._seconds + took_ns / SECOND_NS
        return took_ns
