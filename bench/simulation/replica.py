"""A simulated replica with given costs: continuous batching, chunked prefill, a prefix cache."""

import dataclasses
import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from bench.simulation.traces import Request
from serve_app.messages.replica_load import ReplicaLoad

PAGE_TOKENS = 16
NEW = 0.2  # weight of a new step in the average speed


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs and capacities of a replica: seconds per step, per row and per cached token of
    decoding sequences; then the capacities of a step, a batch and the cache."""

    step_s: float
    prefill_row_s: float
    decode_row_s: float
    cached_token_s: float
    step_tokens: int
    slots: int
    cache_tokens: int

    def slower(self, times: float) -> "StepCosts":
        return dataclasses.replace(
            self,
            step_s=self.step_s * times,
            prefill_row_s=self.prefill_row_s * times,
            decode_row_s=self.decode_row_s * times,
            cached_token_s=self.cached_token_s * times,
        )


@dataclass(eq=False, slots=True)
class Job:
    """A request on a replica. `left`: prompt tokens to compute. `hit`: tokens from the cache.

    `pinned`: cache tokens that it occupies until it ends; admission checks that they are free.
    `published`: how many of them other requests can share.
    """

    request: Request
    left: int
    hit: int = 0
    pinned: int = 0
    published: int = 0
    first_at: float = 0.0


@dataclass(eq=False, slots=True)
class Replica:
    """A simulated replica. Between two values of `due`, only the queue changes.

    `leaps`: the number of steps that are simulated at once until `due`. It is more than one while
    all sequences decode, and ends with the first answer that ends. `cached`: the cached range of
    each stream, least recently used first.
    """

    id: str
    costs: StepCosts
    due: float | None = None
    leaps: int = 0
    begun_at: float = 0.0
    busy_s: float = 0.0
    queued_tokens: int = 0
    waiting: deque[Job] = field(default_factory=deque)
    prefilling: list[Job] = field(default_factory=list)
    decoding: list[tuple[int, int, Job]] = field(default_factory=list)  # a heap, by the last step
    cached: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    _chunks: list[tuple[Job, int]] = field(default_factory=list)
    _step_s: float = 0.0
    _steps: int = 0
    _started: int = 0
    _cached_tokens: int = 0
    _pinned_tokens: int = 0
    _published_tokens: int = 0  # pinned tokens that are also in `cached`
    _context_tokens: int = 0  # of all decoding sequences
    _computed_tokens: int = 0
    _tokens_per_s: float | None = None

    @property
    def outstanding(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    @property
    def jobs(self) -> list[Job]:
        return [*self.waiting, *self.prefilling, *(entry[2] for entry in self.decoding)]

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            queued_tokens=self.queued_tokens,
            running=len(self.prefilling) + len(self.decoding),
            waiting=len(self.waiting),
            slots=self.costs.slots,
            memory=self._pinned_tokens / self.costs.cache_tokens,
            tokens_per_s=self._tokens_per_s,
            started=self._started,
            computed_tokens=self._computed_tokens,
            cache_tokens=self.costs.cache_tokens,
        )

    def add(self, request: Request, now: float) -> Job:
        """Queues a request; a simulation of several steps at once is cut after the current step."""
        job = Job(request, request.tokens)
        self.waiting.append(job)
        self.queued_tokens += request.tokens
        if self.due is None:
            self._begin(now)
        elif self.leaps > 1:
            self.leaps = min(self.leaps, int((now - self.begun_at) / self._step_s) + 1)
            self.due = self.begun_at + self.leaps * self._step_s
        return job

    def drop(self, job: Job) -> None:
        """Removes a queued request."""
        self.waiting.remove(job)
        self.queued_tokens -= job.left

    def advance(self, now: float) -> tuple[list[Job], list[Job]]:
        """Ends the due steps and begins the next one; returns the requests that started and those
        that completed."""
        self._note_speed()
        decoded = len(self.decoding) * self.leaps
        self._steps += self.leaps
        self._context_tokens += decoded
        self._computed_tokens += decoded + sum(count for _, count in self._chunks)
        started = []
        for job, count in self._chunks:
            job.left -= count
            if not job.left:
                self._start(job, now)
                started.append(job)
        done = self._finished()
        self._begin(now)
        return started, done

    def _note_speed(self) -> None:
        """Measures full steps only, as the engine does."""
        computed = sum(count for _, count in self._chunks)
        if not computed or 2 * (computed + len(self.decoding)) < self.costs.step_tokens:
            return
        speed = computed / self._step_s
        known = speed if self._tokens_per_s is None else self._tokens_per_s
        self._tokens_per_s = known + NEW * (speed - known)

    def _start(self, job: Job, now: float) -> None:
        request = job.request
        self.prefilling.remove(job)
        job.first_at = now
        self._started += 1
        job.published = min(job.pinned, self._keep(request, request.tokens))
        self._published_tokens += job.published
        self._evict()
        last = self._steps + request.answer - 1
        heapq.heappush(self.decoding, (last, self._started, job))
        self._context_tokens += request.tokens

    def _finished(self) -> list[Job]:
        done = []
        while self.decoding and self.decoding[0][0] <= self._steps:
            job = heapq.heappop(self.decoding)[2]
            request = job.request
            self._context_tokens -= request.tokens + request.answer - 1
            self._pinned_tokens -= job.pinned
            self._published_tokens -= job.published
            self._keep(request, request.tokens + request.answer)
            self._evict()
            done.append(job)
        return done

    def _begin(self, now: float) -> None:
        costs = self.costs
        budget = costs.step_tokens - len(self.decoding)
        self._chunks = []
        for job in self.prefilling:
            budget -= self._take(job, budget)
        while budget > 0 and self.waiting and self._admit(self.waiting[0]):
            budget -= self._take(self.prefilling[-1], budget)
        self.begun_at = now
        if not self._chunks and not self.decoding:
            self.due = None
            return
        self._step_s = (
            costs.step_s
            + costs.prefill_row_s * sum(count for _, count in self._chunks)
            + costs.decode_row_s * len(self.decoding)
            + costs.cached_token_s * self._context_tokens
        )
        self.leaps = 1 if self._chunks else max(1, self.decoding[0][0] - self._steps)
        self.due = now + self.leaps * self._step_s

    def _take(self, job: Job, budget: int) -> int:
        count = min(job.left, max(0, budget))
        if count:
            self._chunks.append((job, count))
            self.queued_tokens -= count
        return count

    def _admit(self, job: Job) -> bool:
        if len(self.prefilling) + len(self.decoding) >= self.costs.slots:
            return False
        request = job.request
        hit = self._hit(request)
        needed = request.tokens - hit + request.answer
        if self._pinned_tokens + needed > self.costs.cache_tokens and self._pinned_tokens:
            return False
        self.waiting.popleft()
        self.prefilling.append(job)
        job.left, job.hit, job.pinned = request.tokens - hit, hit, needed
        self.queued_tokens -= hit
        self._pinned_tokens += needed
        self._evict()
        return True

    def _hit(self, request: Request) -> int:
        hit = 0
        for stream, _, end in request.parts:
            held = self.cached.get(stream)
            if held is None:
                break
            self.cached.move_to_end(stream)
            hit = min(held[1], end)
            if hit < end:
                break
        return min(hit, request.tokens - 1) // PAGE_TOKENS * PAGE_TOKENS

    def _keep(self, request: Request, until: int) -> int:
        """Caches the request's parts, the last one up to `until`; returns the number of added
        tokens."""
        before = self._cached_tokens
        for stream, begin, end in reversed(request.parts):
            end = until if end == request.tokens else end
            held = self.cached.pop(stream, (begin, begin))
            self._cached_tokens += max(0, end - held[1])
            self.cached[stream] = (begin, max(end, held[1]))
        return self._cached_tokens - before

    def _evict(self) -> None:
        room = self.costs.cache_tokens - self._pinned_tokens + self._published_tokens
        while self._cached_tokens > room and self.cached:
            stream, (begin, end) = self.cached.popitem(last=False)
            gone = min(end - begin, self._cached_tokens - room)
            self._cached_tokens -= gone
            if end - gone > begin:
                self.cached[stream] = (begin, end - gone)
                self.cached.move_to_end(stream, last=False)
