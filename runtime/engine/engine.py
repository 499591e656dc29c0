"""The engine loop: plan and launch a step, retire the previous one, deliver its deltas."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from runtime.engine.engine_statistics import EngineStatistics
from runtime.engine.next_step import ImageNeed
from runtime.engine.request import (
    Delta,
    DrawFailure,
    FinishReason,
    GenerationRequest,
    Pooled,
    Sampled,
    Scored,
    Usage,
)
from runtime.engine.scheduler import Advance, Scheduler
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Runner, StepPlan
from runtime.engine.text_stream import TextStream
from runtime.engine.throughput import Throughput
from runtime.engine.tracing import Deliver, Tracer, TraceSink
from runtime.errors import (
    CaravanError,
    EngineDeadError,
    GenerationFailedError,
    OverloadedError,
    RequestError,
)
from runtime.vision.encoder import PreparedImage
from runtime.vision.feature_cache import FeatureStore


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of requests.

    `max_live`: running and waiting requests together; a tenant may have `slots` of them, and as
    many more as are free (`may_enter`). `most_images`: maximum number of images of a request for
    cross-attention, None for any number. `image_rows`: maximum feature rows of an image, 0 for a
    model without vision. `step_tokens`: maximum length of a `whole` image span.
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
        """How many requests a tenant may have while no other tenant has any."""
        return -(-(self.slots + self.max_live) // 2)


@dataclass(slots=True)
class _Totals:
    """The counters of `EngineStatistics` that the engine itself increases."""

    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0


@dataclass(eq=False, slots=True)
class _Live:
    """A request between its arrival and its last delta; times in the clock's nanoseconds."""

    sequence: Sequence
    text: TextStream
    deliver: Deliver
    arrived: int
    first_step: int | None = None
    first_token: int | None = None


class Engine:
    """Runs requests on one thread and delivers their deltas. `depth`: steps in flight."""

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
        trace_sink: TraceSink | None = None,
    ) -> None:
        assert depth >= 1
        self.features = features
        self._scheduler = scheduler
        self._runner = runner
        self._token_bytes = token_bytes
        self.limits = limits
        self._depth = depth
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._by_sequence: dict[Sequence, _Live] = {}
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._totals = _Totals()
        self._throughput = Throughput()
        self._tracer = Tracer(trace_sink, clock)

    def add(self, request: GenerationRequest, deliver: Deliver, *, arrived: int) -> None:
        """Queue a request that `admissible` has returned; `deliver` receives its deltas."""
        assert request.id not in self._live
        text = TextStream(request.stop.strings, keep_match=request.stop.keep_match)
        if request.resume is not None:
            sampled = b"".join(self._bytes_of(request, token) for token in request.resume.tokens)
            text.resume(sampled, request.resume.characters)
        live = _Live(self._scheduler.add(request), text, deliver, arrived)
        if request.trace or self._tracer.every:
            live.deliver = self._tracer.begin(live.sequence, deliver)
        self._live[request.id] = live
        self._by_sequence[live.sequence] = live

    def abort(self, request_id: str) -> None:
        """End a request whose client has disconnected; ignored if it has ended."""
        live = self._live.get(request_id)
        if live is not None:
            self._scheduler.finish(live.sequence)
            self._end(live, Delta(), FinishReason.ABORTED)

    def step(self) -> bool:
        """Launch a step if possible, retire one if necessary. False if there was nothing to do;
        then only a new request or new image features can change that. Also requests the features
        that the step and those after it need."""
        features, scheduler = self.features, self._scheduler
        if features is None:
            plan = scheduler.plan()
        else:
            for digest, failure in features.collect().items():
                self._fail_for_image(digest, failure)
            plan = scheduler.plan(features.ready)
            features.provide([_image(need) for need in scheduler.image_needs])
        if self._tracer.live:
            self._tracer.planned(plan)
        if plan is not None:
            self._note_launch(plan)
            self._in_flight.append((plan, self._runner.launch(plan)))
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            self._retire(*self._in_flight.popleft())
            return True
        return plan is not None or (features is not None and features.has_finished)

    def fail(self, error: str) -> None:
        """End every live request with FAILED."""
        for live in list(self._live.values()):
            self._end(live, Delta(error=error), FinishReason.FAILED)

    @property
    def unfinished(self) -> int:
        """The number of requests."""
        return len(self._live)

    def statistics(self) -> EngineStatistics:
        scheduler, cache_manager = self._scheduler, self._scheduler.cache_manager
        unfinished = [*scheduler.waiting, *scheduler.running]
        throughput, checkpoints = self._throughput, cache_manager.checkpoints
        host_store = cache_manager.host_store
        return EngineStatistics(
            **asdict(self._totals),
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            slots=scheduler.slots,
            queued_tokens=sum(self._queued(sequence) for sequence in unfinished),
            pages_total=cache_manager.pages_total,
            pages_owned=cache_manager.pages_owned,
            kv_occupancy=cache_manager.occupancy,
            cacheable_tokens=cache_manager.cacheable_tokens,
            checkpoints_held=checkpoints.held if checkpoints else 0,
            checkpoints_taken_total=checkpoints.taken if checkpoints else 0,
            checkpoint_hits_total=checkpoints.hits if checkpoints else 0,
            host_pages_stored_total=host_store.stored if host_store else 0,
            host_pages_restored_total=host_store.restored if host_store else 0,
            preemptions_total=scheduler.preemptions,
            shifts_total=scheduler.shifts,
            images_waiting=self.features.pending if self.features else 0,
            tokens_per_s=throughput.tokens_per_s,
            computed_tokens_total=throughput.computed_tokens,
            first_tokens_total=throughput.first_tokens,
            images_encoded_total=self.features.encoded if self.features else 0,
            proposed_tokens_total=scheduler.proposed_tokens,
            accepted_tokens_total=scheduler.accepted_tokens,
            drafted_tokens_total=scheduler.drafted_tokens,
            accepted_drafts_total=scheduler.accepted_drafts,
        )

    def _queued(self, sequence: Sequence) -> int:
        """The sequence's part of `queued_tokens`; a single remaining token is that of an answer."""
        features, awaited = self.features, sequence.awaited
        if features is not None and awaited and not all(map(features.ready, awaited)):
            return 0
        return sequence.remaining if sequence.remaining > 1 else 0

    def _fail_for_image(self, digest: bytes, failure: CaravanError) -> None:
        """End the requests that wait for the image; a later request encodes it again."""
        retried = isinstance(failure, OverloadedError)
        for need in self._scheduler.image_needs:
            live = self._by_sequence.get(need.sequence)
            if need.digest != digest or live is None:
                continue
            images = [image.digest for image in need.sequence.request.images]
            number = f"{images.index(digest) + 1} of {len(images)}"
            self._scheduler.finish(live.sequence)
            delta = Delta(
                error=f"Image {number} could not be encoded: {failure}",
                error_class=type(failure) if retried else GenerationFailedError,
            )
            self._end(live, delta, FinishReason.FAILED)

    def _note_launch(self, plan: StepPlan) -> None:
        now, lengths = self._clock(), []
        for chunk in plan.chunks:
            lengths.append(chunk.length)
            live = self._by_sequence[chunk.sequence]
            if live.first_step is None:
                live.first_step = now
        self._throughput.launch(lengths, now, offered=self._scheduler.offered_rows)

    def _note_first_token(self, live: _Live, now: int) -> None:
        """Requests with images, and resumed ones, do not count: they wait for more than a slot."""
        live.first_token = now
        request = live.sequence.request
        if not request.images and request.resume is None:
            self._throughput.first_tokens += 1

    def _retire(self, plan: StepPlan, launched: Any) -> None:
        results = self._runner.collect(launched)
        now = self._clock()
        took_ns = self._throughput.retire(now)
        self._scheduler.cache_manager.note_prefill_speed(self._throughput.tokens_per_s)
        if self._scheduler.speculation is not None:
            self._scheduler.speculation.observe(plan, took_ns)
        if self._scheduler.step_budget is not None:
            self._scheduler.step_budget.observe(plan, took_ns, now)
        for advance in self._scheduler.retire(plan, results):
            self._deliver(advance, now)
        self._totals.steps_total += 1

    def _deliver(self, advance: Advance, now: int) -> None:
        sequence, sampled, finish, scores = advance
        live = self._by_sequence[sequence]
        first = live.first_token is None
        if first:
            self._note_first_token(live, now)
        if not isinstance(sampled, Sampled):
            self._end_without_token(live, sampled, scores)
            return
        self._totals.completion_tokens_total += 1
        text, shown = self._push(live, sampled, ended=finish is FinishReason.STOP)
        if live.text.stopped:
            finish = FinishReason.STOP
            self._scheduler.finish(sequence)
        delta = Delta(  # positional arguments are faster; each step creates one per sequence
            text,
            (sampled.token,),
            _logprobs(live, shown),
            self._usage(live) if first else None,
            scores,
            None if finish is None else _matched(live, sampled.token, finish),
        )
        if finish is None:
            live.deliver(delta)
        else:
            self._end(live, delta, finish)

    def _end_without_token(
        self, live: _Live, outcome: Pooled | Scored | DrawFailure, scores: tuple[Sampled, ...]
    ) -> None:
        if isinstance(outcome, Pooled):
            self._end(live, Delta(vector=outcome.vector), FinishReason.STOP)
        elif isinstance(outcome, Scored):
            self._end(live, Delta(prompt_logprobs=scores), FinishReason.LENGTH)
        else:
            error_class = RequestError if outcome.by_request else GenerationFailedError
            delta = Delta(error=outcome.reason, error_class=error_class)
            self._end(live, delta, FinishReason.FAILED)

    def _push(
        self, live: _Live, sampled: Sampled, *, ended: bool
    ) -> tuple[str, tuple[Sampled, ...]]:
        """The text that the token makes certain, and its tokens. A token that has `ended` the
        answer counts, but has no text unless the request keeps it."""
        request = live.sequence.request
        stop = request.stop
        if ended and not (stop.keep_match and sampled.token in stop.reported):
            return "", ()
        may_stop = bool(stop.strings) and not ended and live.sequence.answered > stop.min_tokens
        piece = self._bytes_of(request, sampled.token)
        return live.text.push(piece, sampled, may_stop=may_stop)

    def _bytes_of(self, request: GenerationRequest, token: int) -> bytes:
        markup = request.markup.get(token)
        return self._token_bytes(token) if markup is None else markup

    def _end(self, live: _Live, delta: Delta, finish: FinishReason) -> None:
        text, shown = live.text.flush()
        usage = self._usage(live)
        logprobs = _logprobs(live, shown)
        last = Delta(
            text,
            logprobs=logprobs,
            usage=usage,
            matched=delta.matched,
            finish=finish,
            error=delta.error,
            vector=delta.vector,
            error_class=delta.error_class,
        )
        del self._live[live.sequence.request.id]
        del self._by_sequence[live.sequence]
        self._totals.prompt_tokens_total += usage.prompt_tokens
        self._totals.cached_tokens_total += usage.cached_tokens
        live.deliver(delta.merged(last))

    def _usage(self, live: _Live) -> Usage:
        now = self._clock()
        sequence = live.sequence
        first_step = now if live.first_step is None else live.first_step
        first_token = now if live.first_token is None else live.first_token
        return Usage(
            prompt_tokens=len(sequence.request.prompt),
            cached_tokens=sequence.cached,
            completion_tokens=sequence.answered,
            queue_ns=first_step - live.arrived,
            prompt_ns=first_token - first_step,
            decode_ns=now - first_token,
        )


def _logprobs(live: _Live, shown: tuple[Sampled, ...]) -> tuple[Sampled, ...]:
    return shown if live.sequence.request.sampling.logprobs is not None else ()


def _matched(live: _Live, token: int, finish: FinishReason) -> str | int | None:
    """The stop string that has ended the answer, or what is reported of the end token."""
    if finish is not FinishReason.STOP or live.text.stopped:
        return live.text.matched
    return live.sequence.request.stop.reported.get(token)


def _image(need: ImageNeed) -> PreparedImage:
    images = need.sequence.request.images
    image = next(image for image in images if image.digest == need.digest)
    assert isinstance(image, PreparedImage)
    return image


def engine_dead(reason: str) -> EngineDeadError:
    return EngineDeadError(f"The engine has stopped: {reason}")
