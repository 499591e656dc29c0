"""How fast an engine has been lately: tokens of prompts per second, and the wait for an answer."""

from collections import deque
from dataclasses import dataclass

# Of the weight that a step has in the speed, what the next one leaves it.
MEMORY = 0.8
# First tokens that count: the latest, of this long.
FIRST_TOKENS = 64
FIRST_TOKENS_S = 30
PERCENTILE = 0.95
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Waits:
    """The 95th percentile, in seconds, of the time to the first token; and of the part of it until
    the first step."""

    ttft_s: float
    queue_s: float


class Throughput:
    """Watches steps and first tokens; times are one clock's nanoseconds.

    Steps that had less than half of `step_tokens` to compute say nothing about the speed: there
    was no more to do. So it is what prompts get while they queue, beside the decoding of others.
    """

    def __init__(self, step_tokens: int) -> None:
        self.computed_tokens = 0
        self.first_tokens = 0
        self.waits: Waits | None = None
        self._step_tokens = step_tokens
        self._launched: deque[tuple[int, int, int]] = deque()
        self._retired_ns = 0
        self._tokens = self._seconds = 0.0
        self._firsts: deque[tuple[int, int, int]] = deque(maxlen=FIRST_TOKENS)

    @property
    def tokens_per_s(self) -> float | None:
        """None before anything was queued."""
        return self._tokens / self._seconds if self._seconds else None

    def launch(self, chunks: list[int], now_ns: int) -> None:
        """A step begins, with so many tokens of each sequence; a single one is no prompt."""
        prompts = sum(length for length in chunks if length > 1)
        self._launched.append((now_ns, sum(chunks), prompts))

    def retire(self, now_ns: int) -> None:
        """The step launched first is done. It had the device since the one before was done."""
        launched_ns, tokens, prompts = self._launched.popleft()
        took_ns = now_ns - max(launched_ns, self._retired_ns)
        self._retired_ns = now_ns
        self.computed_tokens += prompts
        if prompts and 2 * tokens >= self._step_tokens and took_ns > 0:
            self._tokens = MEMORY * self._tokens + prompts
            self._seconds = MEMORY * self._seconds + took_ns / SECOND_NS

    def begin(self, now_ns: int, *, queue_ns: int, ttft_ns: int) -> None:
        """A request has its first token."""
        self.first_tokens += 1
        self._firsts.append((now_ns, ttft_ns, queue_ns))
        while self._firsts[0][0] < now_ns - FIRST_TOKENS_S * SECOND_NS:
            self._firsts.popleft()
        _, ttfts, queues = (sorted(each) for each in zip(*self._firsts, strict=True))
        place = int(PERCENTILE * len(ttfts))
        self.waits = Waits(ttfts[place] / SECOND_NS, queues[place] / SECOND_NS)
