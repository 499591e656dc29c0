"""Events of traced requests, for debugging: what the engine computes for them and delivers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.engine.request import Delta, GenerationRequest
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk, StepPlan

Deliver = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event of a request; `at_ns` by the engine's clock.

    `tokens`: the prompt's ids in a `request`, sampled ids in a `delta`, the proposed id of a
    `chunk`. `facts`: frozen dataclasses and JSON values by name. The kinds, in order:

    - `request`: it is queued.
    - `admitted`: it has a slot, and its first `cached_tokens` positions are in the prefix cache.
    - `chunk`: a step computes the positions [start, start + length); if `samples`, also the token
      after them. With `proposed_by`, its token, which is in `tokens`, is a proposal of speculation.
    - `preempted`: its pages are released; `admitted` follows again.
    - `shifted`: `dropped_tokens` have left its full context, in which `kept_tokens` remain;
      `admitted` follows again if these are computed again.
    - `delta`: sampled tokens, and the text that they make certain; the last one has `finish`.
    """

    request: str
    kind: str
    at_ns: int
    tokens: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The traced state of a sequence: its dropped tokens, and its epoch if it has a slot."""

    dropped: int
    epoch: int | None = None


class TraceSink(Protocol):
    """Receives events on the engine's thread; `write` neither waits nor raises.

    `every`: all requests are traced, otherwise those with `GenerationRequest.trace`.
    """

    every: bool

    def write(self, event: TraceEvent) -> None: ...


class Tracer:
    """Reports the events of traced requests to `sink`; without one, requests cannot be traced."""

    def __init__(self, sink: TraceSink | None, clock: Callable[[], int]) -> None:
        self._sink = sink
        self._clock = clock
        self.every = sink is not None and sink.every
        self.live: dict[Sequence, _Seen] = {}

    def begin(self, sequence: Sequence, deliver: Deliver) -> Deliver:
        """Traces a queued sequence until the last delta passes through the returned function."""
        request = sequence.request
        self.live[sequence] = _Seen(sequence.sampling.dropped)
        self._write(request, "request", request.prompt, _request_facts(request))

        def traced(delta: Delta) -> None:
            if delta.finish is not None:
                del self.live[sequence]
            self._write(request, "delta", delta.tokens, _delta_facts(delta))
            deliver(delta)

        return traced

    def planned(self, plan: StepPlan | None) -> None:
        """Report a plan, and the preemptions and shifts since the last one. Call it after
        `Scheduler.plan`."""
        for sequence, seen in self.live.items():
            self._interrupted(sequence, seen)
        for chunk in plan.chunks if plan is not None else ():
            if chunk.sequence in self.live:
                self._launched(chunk)

    def _interrupted(self, sequence: Sequence, seen: "_Seen") -> None:
        dropped = sequence.sampling.dropped - seen.dropped
        left_slot = seen.epoch is not None and seen.epoch < sequence.epoch
        if not dropped and not left_slot:
            return
        facts = {"kept_tokens": len(sequence.tokens)}
        kind = "preempted"
        if dropped > 0:
            kind, facts = "shifted", facts | {"dropped_tokens": dropped}
        self._write(sequence.request, kind, (), facts)
        epoch = sequence.epoch if dropped > 0 and sequence.cut_tokens else None
        self.live[sequence] = _Seen(sequence.sampling.dropped, epoch)

    def _launched(self, chunk: Chunk) -> None:
        sequence, start = chunk.sequence, chunk.start
        if self.live[sequence].epoch is None:
            self.live[sequence] = _Seen(sequence.sampling.dropped, chunk.epoch)
            facts = {"slot": chunk.slot, "cached_tokens": start}
            self._write(sequence.request, "admitted", (), facts)
        part = {"start": start, "length": chunk.length, "samples": chunk.samples}
        if not chunk.proposed:
            self._write(sequence.request, "chunk", (), part)
            return
        source = {"proposed_by": "draft" if sequence.drafted else "ngram"}
        self._write(sequence.request, "chunk", chunk.known, part | source)

    def _write(
        self,
        request: GenerationRequest,
        kind: str,
        tokens: tuple[int, ...],
        facts: Mapping[str, Any],
    ) -> None:
        assert self._sink is not None, "the request is traced, but nothing receives its events"
        self._sink.write(TraceEvent(request.id, kind, self._clock(), tokens, facts))


def _request_facts(request: GenerationRequest) -> dict[str, Any]:
    spans = [
        {
            "start": span.start,
            "length": span.length,
            "whole": span.whole,
            "cross_rows": span.cross_rows,
            "digest": span.digest.hex(),
        }
        for span in request.spans
    ]
    return {
        "spans": spans,
        "sampling": request.sampling,
        "stop": request.stop,
        "grammar": request.grammar is not None,
        "resumed": () if request.resume is None else request.resume.tokens,
    }


def _delta_facts(delta: Delta) -> dict[str, Any]:
    facts: dict[str, Any] = {"text": delta.text}
    if delta.logprobs:
        facts["logprobs"] = tuple(sampled._asdict() for sampled in delta.logprobs)
    if delta.finish is not None:
        ended = {"matched": delta.matched, "usage": delta.usage, "error": delta.error}
        facts |= {"finish": delta.finish.value, **ended}
    return facts
