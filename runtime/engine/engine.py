"""The loop: plan, launch, retire the step before, deliver."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.engine.fairness import may_enter
from runtime.engine.request import (
    Delta,
    FinishReason,
    GenerationRequest,
    Outcome,
    Pooled,
    Sampled,
    Usage,
)
from runtime.engine.scheduler import Advance, Scheduler, Sequence, StepPlan, Wanted
from runtime.engine.text_stream import TextStream
from runtime.engine.throughput import Throughput
from runtime.errors import EngineDeadError, OverloadedError, PromptTooLongError, RequestError
from runtime.vision.encoder import PreparedImage
from runtime.vision.feature_cache import FeatureStore

Deliver = Callable[[Delta], None]


class Runner(Protocol):
    """The device side. Launched plans run in order; `collect` waits for one of them.

    Results are aligned with the plan's chunks, None where a chunk does not sample.
    """

    def launch(self, plan: StepPlan) -> Any: ...

    def collect(self, launched: Any) -> tuple[Outcome | None, ...]: ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request must respect. `max_live` bounds running and waiting requests together, of
    which one tenant may have as many as are still free beside `slots` of them (`may_enter`).

    `most_images`: how many images a request may bring for cross-attention, None for any number.
    `image_rows`: how many rows of features an image has at most, 0 where the model sees none.
    `step_tokens`: how long a span may be that must stay whole.
    """

    context_tokens: int
    vocab_size: int
    max_live: int
    most_images: int | None = None
    image_rows: int = 0
    step_tokens: int | None = None
    slots: int = 0

    @property
    def tenant_share(self) -> int:
        """How many requests a tenant may have while there are no others."""
        return -(-(self.slots + self.max_live) // 2)


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Where the engine stands, how fast it has been lately, what it has done since its start.

    `queued_tokens`: of prompts that wait for nothing but their turn; of answers, what has to be
    computed again. The rest of what is known of speed and waits is in `throughput`; None before
    there was any.
    """

    waiting: int = 0
    running: int = 0
    slots: int = 0
    waiting_tokens: int = 0  # tokens that exist and no step has computed yet
    queued_tokens: int = 0
    pages_total: int = 0
    pages_owned: int = 0
    kv_occupancy: float = 0.0
    cacheable_tokens: int = 0  # what the prefix cache holds at most
    images_waiting: int = 0  # being encoded, or waiting for it
    tokens_per_s: float | None = None
    ttft_s: float | None = None
    ttft_queue_s: float | None = None
    computed_tokens_total: int = 0  # of prompts
    first_tokens_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    images_encoded_total: int = 0


@dataclass(eq=False, slots=True)
class _Live:
    """One request between its arrival and its last delta; times are the clock's nanoseconds."""

    sequence: Sequence
    text: TextStream
    deliver: Deliver
    arrived: int
    begun: int | None = None
    first: int | None = None


class Engine:
    """Requests in, deltas out, on one thread. `depth` steps may be in flight at once."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        token_bytes: Callable[[int], bytes],
        limits: EngineLimits,
        depth: int,
        features: FeatureStore | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        assert depth >= 1
        self.features = features
        self._scheduler = scheduler
        self._runner = runner
        self._token_bytes = token_bytes
        self._limits = limits
        self._depth = depth
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._by_sequence: dict[Sequence, _Live] = {}
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._totals = EngineStatistics()
        self._throughput = Throughput(scheduler.step_tokens)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def add(self, request: GenerationRequest, deliver: Deliver, *, arrived: int) -> None:
        """Queue a request that `admissible` has passed; `deliver` gets its deltas."""
        assert request.id not in self._live
        text = TextStream(request.stop.strings)
        if request.begun is not None:
            begun = b"".join(map(self._token_bytes, request.begun.tokens))
            text.resume(begun, request.begun.characters)
        live = _Live(self._scheduler.add(request), text, deliver, arrived)
        self._live[request.id] = live
        self._by_sequence[live.sequence] = live

    def abort(self, request_id: str) -> None:
        """End a request whose reader has left; one that is unknown has ended already."""
        live = self._live.get(request_id)
        if live is not None:
            self._scheduler.finish(live.sequence)
            self._end(live, Delta(), FinishReason.ABORTED)

    def step(self) -> bool:
        """Launch what can be launched, retire what must be; False when there was nothing to do.

        Then only a new request, or features that come, change that.
        """
        plan = self._plan()
        if plan is not None:
            self._note_begun(plan)
            self._in_flight.append((plan, self._runner.launch(plan)))
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            self._retire(*self._in_flight.popleft())
            return True
        return plan is not None or (self.features is not None and self.features.has_news)

    def fail(self, error: str) -> None:
        """End every live request with FAILED."""
        for live in list(self._live.values()):
            self._end(live, Delta(error=error), FinishReason.FAILED)

    def statistics(self) -> EngineStatistics:
        scheduler, cache_manager = self._scheduler, self._scheduler.cache_manager
        unfinished = [*scheduler.waiting, *scheduler.running]
        pace, waits = self._throughput, self._throughput.waits
        return dataclasses.replace(
            self._totals,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            slots=scheduler.slots,
            waiting_tokens=sum(sequence.remaining for sequence in unfinished),
            queued_tokens=sum(self._queued(sequence) for sequence in unfinished),
            pages_total=cache_manager.pages_total,
            pages_owned=cache_manager.pages_owned,
            kv_occupancy=cache_manager.occupancy,
            cacheable_tokens=cache_manager.cacheable_tokens,
            preemptions_total=scheduler.preemptions,
            images_waiting=self.features.coming if self.features else 0,
            tokens_per_s=pace.tokens_per_s,
            ttft_s=waits.ttft_s if waits else None,
            ttft_queue_s=waits.queue_s if waits else None,
            computed_tokens_total=pace.computed_tokens,
            first_tokens_total=pace.first_tokens,
            images_encoded_total=self.features.encoded if self.features else 0,
        )

    def _queued(self, sequence: Sequence) -> int:
        """What it has of a prompt to be computed. One token is the next one of an answer."""
        features, awaited = self.features, sequence.awaited
        if features is not None and awaited and not all(map(features.ready, awaited)):
            return 0
        return sequence.remaining if sequence.remaining > 1 else 0

    def _plan(self) -> StepPlan | None:
        """The next step; what it and those behind it need of images is held or asked for."""
        store, scheduler = self.features, self._scheduler
        if store is None:
            return scheduler.plan()
        for digest, reason in store.collect().items():
            self._fail_for_image(digest, reason)
        plan = scheduler.plan(store.ready)
        store.provide([_image(wanted) for wanted in scheduler.wanted])
        return plan

    def _fail_for_image(self, digest: bytes, reason: str) -> None:
        """End those who wait for it; whoever asks for it later lets it be tried again."""
        for wanted in self._scheduler.wanted:
            live = self._by_sequence.get(wanted.sequence)
            if wanted.digest != digest or live is None:
                continue
            images = [image.digest for image in wanted.sequence.request.images]
            number = f"{images.index(digest) + 1} of {len(images)}"
            self._scheduler.finish(live.sequence)
            error = f"Image {number} could not be encoded: {reason}"
            self._end(live, Delta(error=error), FinishReason.FAILED)

    def _note_begun(self, plan: StepPlan) -> None:
        now = self._clock()
        for chunk in plan.chunks:
            live = self._by_sequence[chunk.sequence]
            if live.begun is None:
                live.begun = now
        self._throughput.launch([chunk.length for chunk in plan.chunks], now)

    def _note_first(self, live: _Live, now: int) -> None:
        """Those that wait for images, or go on from elsewhere, tell nothing of the queue."""
        live.first = now
        request = live.sequence.request
        if live.begun is not None and not request.images and request.begun is None:
            self._throughput.begin(
                now, queue_ns=live.begun - live.arrived, ttft_ns=now - live.arrived
            )

    def _retire(self, plan: StepPlan, launched: Any) -> None:
        results = self._runner.collect(launched)
        now = self._clock()
        self._throughput.retire(now)
        for advance in self._scheduler.retire(plan, results):
            self._deliver(advance, now)
        self._totals = dataclasses.replace(self._totals, steps_total=self._totals.steps_total + 1)

    def _deliver(self, advance: Advance, now: int) -> None:
        live = self._by_sequence[advance.sequence]
        opening = live.first is None
        if opening:
            self._note_first(live, now)
        sampled, finish = advance.outcome, advance.finish
        if isinstance(sampled, Pooled):
            self._end(live, Delta(vector=sampled.vector), FinishReason.STOP)
            return
        if not isinstance(sampled, Sampled):
            self._end(live, Delta(error=sampled.reason), FinishReason.FAILED)
            return
        text, shown = "", tuple[Sampled, ...]()
        if finish is not FinishReason.STOP:  # an end token is counted, never shown
            text, shown = live.text.push(self._token_bytes(sampled.token), sampled)
            if live.text.stopped:
                finish = FinishReason.STOP
                self._scheduler.finish(advance.sequence)
        usage = self._usage(live) if opening else None
        delta = Delta(text, (sampled.token,), self._asked(live, shown), usage=usage)
        if finish is None:
            live.deliver(delta)
        else:
            self._end(live, delta, finish)

    def _asked(self, live: _Live, shown: tuple[Sampled, ...]) -> tuple[Sampled, ...]:
        return shown if live.sequence.request.sampling.logprobs is not None else ()

    def _end(self, live: _Live, delta: Delta, finish: FinishReason) -> None:
        text, shown = live.text.flush()
        usage = self._usage(live)
        asked = self._asked(live, shown)
        last = Delta(text, (), asked, finish, usage, delta.error, delta.vector)
        del self._live[live.sequence.request.id]
        del self._by_sequence[live.sequence]
        totals, begun = self._totals, live.sequence.request.begun
        drawn = usage.completion_tokens - (len(begun.tokens) if begun else 0)
        self._totals = dataclasses.replace(
            totals,
            prompt_tokens_total=totals.prompt_tokens_total + usage.prompt_tokens,
            cached_tokens_total=totals.cached_tokens_total + usage.cached_tokens,
            completion_tokens_total=totals.completion_tokens_total + drawn,
        )
        live.deliver(delta.merged(last))

    def _usage(self, live: _Live) -> Usage:
        now = self._clock()
        sequence = live.sequence
        prompt = len(sequence.request.prompt)
        begun = now if live.begun is None else live.begun
        first = now if live.first is None else live.first
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=sequence.cached,
            completion_tokens=len(sequence.tokens) - prompt,
            queue_ns=begun - live.arrived,
            prompt_ns=first - begun,
            decode_ns=now - first,
        )


def admissible(
    request: GenerationRequest, limits: EngineLimits, *, live: int, own: int = 0
) -> GenerationRequest:
    """The request with its answer's length cut to the context, or an error that says why not.

    `live`: requests that run and wait already; `own`: those of the request's tenant among them.
    """
    length = len(request.prompt)
    if length == 0:
        raise RequestError("The prompt has no tokens.")
    if not all(0 <= token < limits.vocab_size for token in request.known):
        raise RequestError(
            f"The prompt has a token id outside the vocabulary of {limits.vocab_size:,} tokens."
        )
    room = limits.context_tokens - length
    if room < (request.pooling is None):
        raise PromptTooLongError(
            f"The prompt has {length:,} tokens; the context holds {limits.context_tokens:,}"
            f"{'' if request.pooling else ', one of them for the answer'}. Shorten the prompt or "
            "raise `context_tokens`."
        )
    if request.images and not limits.image_rows:
        raise RequestError("The model sees no images. Leave them out.")
    _check_spans(request, limits)
    images = sum(span.cross_rows > 0 for span in request.spans)
    if limits.most_images is not None and images > limits.most_images:
        raise RequestError(
            f"The conversation has {images:,} images; the model takes {limits.most_images:,}. "
            "Leave some out."
        )
    if request.begun is None:  # resumed requests are never refused
        _check_places(limits, live, own)
    if request.pooling is not None:
        return request
    stop = dataclasses.replace(request.stop, max_tokens=min(request.stop.max_tokens, room))
    drawn = len(request.known) - length
    if drawn >= stop.max_tokens:
        raise RequestError(
            f"The answer has {drawn:,} tokens already; it may have {stop.max_tokens:,}."
        )
    return dataclasses.replace(request, stop=stop)


def _check_places(limits: EngineLimits, live: int, own: int) -> None:
    if live >= limits.max_live:
        raise OverloadedError(
            f"{live:,} requests run and wait here already, the most that this replica takes."
        )
    if not may_enter(own, live, limits.max_live, reserved=limits.slots):
        raise OverloadedError(
            f"{own:,} requests of this client run and wait here already; of the places left, "
            f"{limits.max_live - live:,} are kept for other clients."
        )


def _check_spans(request: GenerationRequest, limits: EngineLimits) -> None:
    """What only a bug in front of the engine could break, and would break the engine for all."""
    ends = [0, *(span.end for span in request.spans)]
    starts = [*(span.start for span in request.spans), len(request.prompt)]
    assert all(end <= start for end, start in zip(ends, starts, strict=True)), "spans overlap"
    longest = limits.step_tokens or len(request.prompt)
    assert all(span.length <= longest for span in request.spans if span.whole), "too long a span"
    rows = {image.digest: image.rows for image in request.images}
    assert all(count <= limits.image_rows for count in rows.values()), "too large an image"
    for span in request.spans:
        beside = span.cross_rows + span.cross_padding
        assert span.digest in rows or not beside, "an image that nobody brings"
        used = beside or span.first_row + span.length
        assert used <= rows.get(span.digest, used), "an image with too few rows"


def _image(wanted: Wanted) -> PreparedImage:
    images = wanted.sequence.request.images
    image = next(image for image in images if image.digest == wanted.digest)
    assert isinstance(image, PreparedImage)
    return image


def dead(reason: str) -> EngineDeadError:
    return EngineDeadError(f"The engine has failed and serves nothing any more: {reason}")
