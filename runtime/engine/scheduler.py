"""Who computes what next: sequences, and the plan of each step.

There are no phases. A sequence's launched count chases its token count; chunked prefill, prefix
hits, decoding and resumption after preemption are all that one chase.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.fairness import FairQueue
from runtime.engine.request import (
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Outcome,
    Pooled,
    Sampled,
    SamplingParams,
)
from runtime.kv.cache_manager import KVCacheManager, PageGrant, PageKey

# Whether the features of the image with this digest are there.
Ready = Callable[[bytes], bool]


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One request on its way. Changed by the scheduler alone."""

    request: GenerationRequest
    tokens: list[int]  # prompt and answer, as far as the host knows them
    state: State = State.WAITING
    slot: int | None = None
    launched: int = 0  # positions handed to the device
    confirmed: int = 0  # positions whose step has retired
    pending: int = 0  # tokens sampled on the device and not yet read back
    epoch: int = 0  # bumped by preemption, so that steps from before it are told apart
    cached: int = 0  # prompt tokens that the prefix cache gave at first admission
    page_keys: list[PageKey] = field(default_factory=list)
    awaited: tuple[bytes, ...] | None = None  # images its first chunk needs; None: not looked at
    inserted: tuple[ImageSpan, ...] = field(init=False)  # those whose features replace embeddings

    def __post_init__(self) -> None:
        images = {image.digest for image in self.request.images}
        inserted = (s for s in self.spans if s.digest in images and not s.cross_rows)
        self.inserted = tuple(inserted)

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        return self.request.spans

    @property
    def cache_salt(self) -> bytes:
        return self.request.cache_salt

    @property
    def resumes(self) -> bool:
        """True after a preemption, or if the request was running on a replica that was lost."""
        begun = self.request.begun
        return self.epoch > 0 or (begun is not None and begun.had_turn)

    @property
    def length(self) -> int:
        """Tokens that exist, here or on the device."""
        return len(self.tokens) + self.pending

    @property
    def produced(self) -> int:
        return self.length - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that exist and are not yet handed to the device."""
        return self.length - self.launched

    @property
    def shares_pages(self) -> bool:
        """A pooled prompt needs the states of all its rows, and may look ahead."""
        return self.request.pooling is None

    def may_end_at(self, position: int) -> bool:
        """Whether a step may end before `position`: not inside an image that must stay whole."""
        return not any(s.whole and s.start < position < s.end for s in self.request.spans)

    def cut(self, count: int) -> int:
        """`count` tokens from `launched` on, fewer where the step would split a whole image."""
        end = self.launched + count
        for span in self.request.spans:
            if span.whole and span.start < end < span.end:
                return max(0, span.start - self.launched)
        return count


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Entry `index` of the slot's page table in `group` becomes `page`."""

    group: int
    slot: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """A sequence enters a slot: all its tokens so far, from position 0, and how it samples."""

    slot: int
    tokens: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, start + length) of one sequence in one step.

    `known` are their token ids; it is empty when `feedback`: then the chunk is one position long
    and its token is the slot's last sampled one, which only the device knows yet. `samples`: the
    last row draws the token at position start + length.
    """

    sequence: Sequence
    epoch: int
    slot: int
    start: int
    length: int
    known: tuple[int, ...]
    feedback: bool
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the device: page table entries, slots to load, then rows to compute."""

    chunks: tuple[Chunk, ...]
    page_writes: tuple[PageWrite, ...]
    slot_loads: tuple[SlotLoad, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step drew for a sequence is known to the host now; `finish` where that ended it."""

    sequence: Sequence
    outcome: Outcome
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence takes the features of an image, in the step just planned or soon."""

    sequence: Sequence
    digest: bytes


@dataclass(slots=True)
class _Draft:
    """A plan in the making: what it may still take, and what it has. `short`: of pages."""

    budget: int
    image_rows: int
    ready: Ready
    chunks: list[Chunk] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    slot_loads: list[SlotLoad] = field(default_factory=list)
    short: bool = False
    used: list[Wanted] = field(default_factory=list)  # images of its chunks
    ahead: list[Wanted] = field(default_factory=list)  # those of the chunks that may come next

    def write(self, slot: int, grants: list[PageGrant]) -> None:
        self.page_writes += [PageWrite(g.group, slot, g.index, g.page) for g in grants]


class Scheduler:
    """Continuous batching over a fixed number of slots and a token budget per step.

    Sequences that go on after a preemption or a lost replica are admitted first, the others by
    turns over their tenants (`FairQueue`). Nothing is preempted for the sake of fairness.
    `step_image_rows`: rows of images that a step fills at most, as many as one sequence may have.
    `wanted`: images of the plan made last, then those that next chunks need, the most urgent first.
    """

    def __init__(
        self,
        cache_manager: KVCacheManager,
        *,
        slots: int,
        step_tokens: int,
        step_image_rows: int = 0,
    ) -> None:
        assert 0 < slots <= step_tokens
        self.cache_manager = cache_manager
        self._resuming: deque[Sequence] = deque()
        self._arriving: FairQueue[Sequence] = FairQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.wanted: tuple[Wanted, ...] = ()
        self.slots = slots
        self.step_tokens = step_tokens
        self._step_image_rows = step_image_rows
        self._free_slots = list(reversed(range(slots)))

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return (*self._resuming, *self._arriving)

    def add(self, request: GenerationRequest) -> Sequence:
        """Queue a request. A step has room for each whole span, and for all rows of images."""
        assert request.prompt and request.stop.max_tokens > 0
        assert all(not s.whole or s.length <= self.step_tokens for s in request.spans)
        sequence = Sequence(request, list(request.known))
        rows = self.cache_manager.image_rows(sequence, 0, len(request.prompt))
        assert rows <= self._step_image_rows, f"{rows} rows of images"
        if sequence.resumes:
            self._resuming.appendleft(sequence)
        else:
            self._arriving.add(request.tenant, sequence)
        return sequence

    def plan(self, ready: Ready = lambda digest: True) -> StepPlan | None:
        """The next step, or None when nothing can be launched before another step retires.

        No chunk takes an image that is not `ready`: it ends before, or its sequence is left out.
        """
        draft = _Draft(self.step_tokens, self._step_image_rows, ready)
        for sequence in list(self.running):
            if sequence.state is State.RUNNING:  # not preempted by an earlier one just now
                self._continue(sequence, draft)
        self._admit_waiting(draft)
        self.wanted = (*draft.used, *draft.ahead)
        if not draft.chunks:
            return None
        return StepPlan(tuple(draft.chunks), tuple(draft.page_writes), tuple(draft.slot_loads))

    def retire(self, plan: StepPlan, results: tuple[Outcome | None, ...]) -> list[Advance]:
        """Take in what a launched step gave, in launch order. Orphans' results are dropped."""
        advances = []
        for chunk, outcome in zip(plan.chunks, results, strict=True):
            sequence = chunk.sequence
            if sequence.state is State.FINISHED:
                continue
            assert chunk.samples == (outcome is not None)
            sequence.pending -= chunk.samples
            if isinstance(outcome, Sampled):
                sequence.tokens.append(outcome.token)
            if chunk.epoch == sequence.epoch:
                sequence.confirmed = chunk.start + chunk.length
                if sequence.shares_pages:
                    self.cache_manager.publish(sequence)
                self.cache_manager.trim(sequence)
            if outcome is not None:
                finish = _finish_reason(sequence, outcome)
                advances.append(Advance(sequence, outcome, finish))
                if finish is not None:
                    self.finish(sequence)
        return advances

    def finish(self, sequence: Sequence) -> None:
        """End a sequence for any reason; its slot and pages are free at once."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.RUNNING:
            self._leave_slot(sequence)
        elif sequence.resumes:
            self._resuming.remove(sequence)
        else:
            self._arriving.remove(sequence.request.tenant, sequence)
        sequence.state = State.FINISHED

    def _continue(self, sequence: Sequence, draft: _Draft) -> None:
        start = sequence.launched
        draft.ahead += self._wanted(sequence, start, start + self.step_tokens)
        count = self._want(sequence, draft)
        if count == 0:
            return
        grants = self.cache_manager.reserve(sequence, sequence.launched + count)
        while grants is None:
            draft.short = True
            victim = self.running[-1]  # the latest admitted: never one that is in the draft
            if victim is sequence and sequence.launched > sequence.confirmed:
                return  # its steps in flight may give pages back
            self._preempt(victim)
            if victim is sequence:
                return
            grants = self.cache_manager.reserve(sequence, sequence.launched + count)
        self._launch(sequence, count, grants, draft)

    def _admit_waiting(self, draft: _Draft) -> None:
        """In turn, but none waits for another one's images; those of the first sequences are
        requested even while there is no place."""
        admitting = True
        for index, sequence in enumerate(self._in_turn()):
            admitting &= bool(self._free_slots and draft.budget and not draft.short)
            if not admitting and index >= self.slots:
                return
            if not self._held_up(sequence, draft, admitting) and admitting:
                admitting = self._admit(sequence, draft)

    def _in_turn(self) -> Iterator[Sequence]:
        yield from tuple(self._resuming)
        running = Counter(sequence.request.tenant for sequence in self.running)
        for _, sequence in self._arriving.in_turn(running):
            yield sequence

    def _held_up(self, sequence: Sequence, draft: _Draft, admitting: bool) -> bool:
        """Whether a waiting sequence lacks the features that its first chunk cannot do without."""
        if not sequence.request.images:
            return False
        known = sequence.awaited
        if known is None or (admitting and not _lacking(sequence, known, draft)):
            start = self.cache_manager.cached_prefix(sequence) if sequence.shares_pages else 0
            known = self.cache_manager.images_needed(sequence, start, start + self.step_tokens)
            sequence.awaited = known  # until it could be admitted; pages come and go
        draft.ahead += [Wanted(sequence, digest) for digest in known]
        return _lacking(sequence, known, draft)

    def _admit(self, sequence: Sequence, draft: _Draft) -> bool:
        if sequence.pending:  # preempted, and a token of it is still on the device
            return False
        hit, shared = self.cache_manager.adopt(sequence) if sequence.shares_pages else (0, [])
        sequence.launched = sequence.confirmed = hit
        count = self._want(sequence, draft)
        grants = self.cache_manager.reserve(sequence, hit + count) if count else None
        if grants is None:
            self.cache_manager.release(sequence)
            sequence.launched = sequence.confirmed = 0
            return False
        if sequence.resumes:
            self._resuming.remove(sequence)
        else:
            self._arriving.serve(sequence.request.tenant, sequence)
        self.running.append(sequence)
        sequence.state = State.RUNNING
        sequence.slot = slot = self._free_slots.pop()
        if sequence.epoch == 0:
            sequence.cached = min(hit, len(sequence.request.prompt))
        draft.slot_loads.append(SlotLoad(slot, tuple(sequence.tokens), sequence.request.sampling))
        self._launch(sequence, count, shared + grants, draft)
        return True

    def _want(self, sequence: Sequence, draft: _Draft) -> int:
        if sequence.produced >= sequence.request.stop.max_tokens:
            return 0
        count = sequence.cut(min(sequence.remaining, draft.budget))
        return self._cut_to_image_rows(sequence, _cut_to_features(sequence, count, draft), draft)

    def _cut_to_image_rows(self, sequence: Sequence, count: int, draft: _Draft) -> int:
        """`count` tokens, fewer where a step would fill too many rows of images or unknown ones."""
        start, end = sequence.launched, sequence.launched + count
        images = (span.start for span in reversed(sequence.spans) if start < span.start < end)
        for stop in (end, *images):
            needed = self.cache_manager.images_needed(sequence, start, stop)
            rows = self.cache_manager.image_rows(sequence, start, stop)
            if rows <= draft.image_rows and all(map(draft.ready, needed)):
                return stop - start
        return 0

    def _wanted(self, sequence: Sequence, start: int, end: int) -> list[Wanted]:
        needed = self.cache_manager.images_needed(sequence, start, end)
        return [Wanted(sequence, digest) for digest in needed]

    def _launch(
        self, sequence: Sequence, count: int, grants: list[PageGrant], draft: _Draft
    ) -> None:
        assert sequence.slot is not None
        start, end = sequence.launched, sequence.launched + count
        samples = end == sequence.length
        feedback = start >= len(sequence.tokens)
        assert not feedback or count == 1
        known = tuple(sequence.tokens[start:end])
        assert feedback or len(known) == count
        draft.chunks.append(
            Chunk(sequence, sequence.epoch, sequence.slot, start, count, known, feedback, samples)
        )
        draft.write(sequence.slot, grants)
        draft.used += self._wanted(sequence, start, end)
        draft.budget -= count
        draft.image_rows -= self.cache_manager.image_rows(sequence, start, end)
        sequence.launched = end
        sequence.pending += samples

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's place; what it has sampled stays valid."""
        self.preemptions += 1
        self._leave_slot(sequence)
        sequence.state = State.WAITING
        sequence.launched = sequence.confirmed = 0
        sequence.epoch += 1
        sequence.awaited = None
        self._resuming.appendleft(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.cache_manager.release(sequence)
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None


def _lacking(sequence: Sequence, needed: tuple[bytes, ...], draft: _Draft) -> bool:
    """One image is enough to begin, but those that are attended to from the side come together."""
    return not all(map(draft.ready, needed[:1] if sequence.inserted else needed))


def _cut_to_features(sequence: Sequence, count: int, draft: _Draft) -> int:
    """`count` tokens from `launched` on, fewer where features would be missing."""
    start, end = sequence.launched, sequence.launched + count
    for span in sequence.inserted:
        if span.start < end and start < span.end and not draft.ready(span.digest):
            return max(0, span.start - start)
    return count


def _finish_reason(sequence: Sequence, outcome: Outcome) -> FinishReason | None:
    stop = sequence.request.stop
    if isinstance(outcome, Pooled):
        return FinishReason.STOP
    if not isinstance(outcome, Sampled):
        return FinishReason.FAILED
    if outcome.token in stop.end_tokens:
        return FinishReason.STOP
    if len(sequence.tokens) - len(sequence.request.prompt) >= stop.max_tokens:
        return FinishReason.LENGTH
    return None
