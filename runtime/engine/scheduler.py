"""The plan of each step.

There are no phases. A sequence's launched count catches up with its token count; chunked prefill,
prefix hits, decoding and resumption after preemption are the same mechanism.
"""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from runtime.engine.context_shift import ContextCut, cut_of
from runtime.engine.fairness import PriorityQueue
from runtime.engine.next_step import FeaturesReady, ImageNeed, NextStep, slot_load
from runtime.engine.request import (
    FinishReason,
    GenerationRequest,
    LateMask,
    Outcome,
    Result,
    Sampled,
    Scored,
)
from runtime.engine.sequence import Sequence, SequenceState
from runtime.engine.speculation import Speculation
from runtime.engine.step_budget import StepBudget
from runtime.engine.step_plan import Chunk, PageWrite, StepPlan
from runtime.kv.cache_kinds import images_within
from runtime.kv.cache_manager import KVCacheManager, PageGrant
from runtime.kv.page_shift import MovedPages

# A prompt leaves rows to those behind it that have at most 1 / SHORTER of its tokens.
SHORTER = 4


class Advance(NamedTuple):  # faster to create than a dataclass; each step creates many
    """The result of a retired step for one sequence; `finish` if that ended the sequence.

    `prompt_logprobs`: as in `Delta`, with the sequence's first result."""

    sequence: Sequence
    outcome: Outcome
    finish: FinishReason | None
    prompt_logprobs: tuple[Sampled, ...] = ()


class Scheduler:
    """Continuous batching over a fixed number of slots and a token budget per step.

    Sequences that resume after a preemption or on another replica are admitted first, the others
    by priority, then in turn over their tenants (`PriorityQueue`). Neither causes preemption.
    A sequence that fills its context drops tokens (`ContextShift`). Its cached pages move or, where
    that is impossible, are computed again: the sequence leaves its slot and is the first to resume.

    `step_image_rows`: the maximum number of image rows of a step, as many as one sequence may have.
    `image_needs`: images of the last plan, then those of later chunks, the most urgent first.
    `speculation` proposes tokens for running sequences. Counters: `proposed_tokens` that were
    launched, `accepted_tokens` among them; `drafted_tokens` and `accepted_drafts`, the same for
    proposals of a draft model only. Prompts and proposals leave a row for each stream, long prompts
    up to half of their rows to much shorter ones behind them, and `step_budget` limits prompt
    tokens in steps that also decode; `offered_rows`: the rows that the last plan could use under
    this limit.
    """

    def __init__(
        self,
        cache_manager: KVCacheManager,
        *,
        slots: int,
        step_tokens: int,
        step_image_rows: int = 0,
        speculation: Speculation | None = None,
        step_budget: StepBudget | None = None,
    ) -> None:
        assert 0 < slots <= step_tokens
        self.cache_manager = cache_manager
        self._resuming: deque[Sequence] = deque()
        self._arriving: PriorityQueue[Sequence] = PriorityQueue()
        self.running: list[Sequence] = []
        self.preemptions = self.shifts = 0
        self.proposed_tokens = self.accepted_tokens = 0
        self.drafted_tokens = self.accepted_drafts = 0
        self.speculation = speculation
        self.step_budget = step_budget
        self.offered_rows = step_tokens
        self._moved: dict[Sequence, MovedPages] = {}  # since the last plan
        self.image_needs: tuple[ImageNeed, ...] = ()
        self.slots = slots
        self.step_tokens = step_tokens
        self._step_image_rows = step_image_rows
        self._free_slots = list(reversed(range(slots)))

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return (*self._resuming, *self._arriving)

    def add(self, request: GenerationRequest) -> Sequence:
        """Queue a request. Each of its whole spans, and all of its image rows, must fit a step."""
        assert request.prompt
        assert request.stop.max_tokens > 0 or request.prompt_logprobs is not None
        sequence = Sequence(request, list(request.known), self._moving_cut(request))
        if request.spans:
            assert all(not s.whole or s.length <= self.step_tokens for s in request.spans)
            rows = self.cache_manager.image_rows(sequence, 0, len(request.prompt))
            assert rows <= self._step_image_rows, f"{rows} image rows"
        if sequence.resumes:
            self._resuming.append(sequence)
        else:
            self._arriving.add(request.tenant, sequence, request.priority)
        return sequence

    def _moving_cut(self, request: GenerationRequest) -> ContextCut | None:
        """The cut of each full context of the request; None if its pages cannot move. It depends on
        the request only, because moved pages differ from recomputed ones."""
        scored = request.prompt_logprobs is not None
        if request.shift is None or request.spans or scored:
            return None
        cut = cut_of(request.shift, len(request.prompt), ())
        computed = request.shift.context_tokens - 1
        return cut if self.cache_manager.can_shift(cut, computed) else None

    def plan(self, ready: FeaturesReady = lambda digest: True) -> StepPlan | None:
        """The next step, or None if nothing can be launched before another step retires.

        No chunk contains an image that is not `ready`: the chunk ends before it, or its sequence is
        left out. Sequences whose masks are late are left out unless the step would be empty.
        """
        if self.speculation is not None:
            waiting = len(self._resuming) + len(self._arriving)
            self.speculation.propose(self.running, joining=min(waiting, len(self._free_slots)))
        for waits_for_masks in (False, True):
            rows = (self.step_tokens, *self._offer())
            step = NextStep(*rows, self._step_image_rows, ready, waits_for_masks)
            for sequence in list(self.running):
                if sequence.state is SequenceState.RUNNING:  # not preempted in this loop
                    self._continue(sequence, step)
            self._admit_waiting(step)
            if step.chunks or not step.lacks_mask or any(each.pending for each in self.running):
                break
        self.image_needs = (*step.used, *step.ahead)
        if not step.chunks:
            return None
        moved, self._moved = self._moved, {}
        for sequence, pages in moved.items():
            step.move(sequence, pages)
        return StepPlan(
            # Chunks of one row first: kernels of attention compute these together.
            tuple(sorted(step.chunks, key=lambda chunk: chunk.length > 1)),
            tuple(step.page_writes),
            tuple(step.slot_loads),
            self.cache_manager.take_copies(),
            tuple(step.proposals),
            tuple(step.key_shifts),
        )

    def _offer(self) -> tuple[int, int]:
        """The most rows for prompts in the next step, and the rows that streams need in it."""
        self.offered_rows = prompt_rows = self.step_tokens
        decoding = [sequence for sequence in self.running if sequence.remaining <= 1]
        if self.step_budget is not None:
            streams = sum(sequence.request.draws for sequence in decoding)
            if streams:
                prompt_rows = self.step_budget.prompt_tokens
                self.offered_rows = min(self.step_tokens, streams + prompt_rows)
        return prompt_rows, len(decoding)

    def retire(self, plan: StepPlan, results: tuple[Result, ...]) -> Iterator[Advance]:
        """Apply the results of a launched step, in launch order, lazily as they are iterated.
        Results of finished sequences and of rejected proposals are dropped."""
        for chunk, outcome in zip(plan.chunks, results, strict=True):
            sequence = chunk.sequence
            if sequence.state is SequenceState.FINISHED:
                continue
            if chunk.proposed:
                sequence.proposing -= 1
                if not _is_right(chunk):
                    continue
                self.accepted_tokens += 1
                self.accepted_drafts += sequence.drafted
            else:
                sequence.pending -= chunk.samples
            if isinstance(outcome, Scored):
                sequence.add_scores(chunk.scores, outcome.prompt)
                if sequence.request.draws or not chunk.samples:
                    outcome = outcome.drawn
            assert outcome is not None or not chunk.samples
            computed = chunk.length
            if isinstance(outcome, Sampled):
                sequence.append(outcome)
            elif isinstance(outcome, LateMask):
                sequence.late_mask, outcome, computed = outcome, None, chunk.length - 1
            if chunk.epoch == sequence.epoch:
                sequence.confirmed = chunk.start + computed
                if chunk.proposed:
                    sequence.launched = sequence.confirmed
                else:
                    sequence.launched -= chunk.length - computed
                if sequence.shares_pages:
                    self.cache_manager.publish(sequence)
                self.cache_manager.trim(sequence)
            if outcome is not None:
                finish = sequence.finish_reason(outcome)
                if finish is not None:
                    self.finish(sequence)
                yield Advance(sequence, outcome, finish, sequence.take_scores())
            if sequence.fills_context:
                self._shift(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence for any reason; its slot and pages are free immediately."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._leave_slot(sequence)
        elif sequence.resumes:
            self._resuming.remove(sequence)
        else:
            request = sequence.request
            self._arriving.remove(request.tenant, sequence, request.priority)
        sequence.state = SequenceState.FINISHED

    def check_idle(self) -> None:
        """Assert that no sequence is left, and that all slots and pages are free; for tests."""
        assert not self.running and not self.waiting, "a sequence has not ended"
        assert sorted(self._free_slots) == list(range(self.slots)), "a slot is lost"
        assert not self._moved, "an ended sequence has moved pages"
        self.cache_manager.check_idle()

    def _continue(self, sequence: Sequence, step: NextStep) -> None:
        start = sequence.launched
        step.stream_rows -= sequence.remaining <= 1
        if sequence.spans:
            step.ahead += self._needs(sequence, start, start + self.step_tokens)
        count = self._chunk_tokens(sequence, step)
        if count == 0:
            return
        proposed = sequence.proposed[: step.rows_beside(count)]
        grants = self.cache_manager.reserve(sequence, start + count + len(proposed))
        if grants is None and proposed:
            proposed = ()
            grants = self.cache_manager.reserve(sequence, start + count)
        while grants is None:
            step.out_of_pages = True
            victim = self.running[-1]  # the latest admitted; never one with a chunk in the step
            if victim is sequence and start > sequence.confirmed:
                return  # its steps in flight may release pages
            self._preempt(victim)
            if victim is sequence:
                return
            grants = self.cache_manager.reserve(sequence, start + count)
        self._launch(sequence, count, grants, step)
        if proposed:
            self._launch_proposed(sequence, proposed, step)

    def _admit_waiting(self, step: NextStep) -> None:
        """Admit sequences in order. One that lacks image features does not block the next ones, nor
        does one that leaves all rows to shorter ones, which leave it a slot; the images of the
        first sequences are requested even if none can be admitted."""
        if not self._resuming and not self._arriving:
            return
        admitting, passed = True, False
        for index, sequence in enumerate(self._in_turn()):
            rows = min(step.budget, step.prompt_rows)
            slots = len(self._free_slots) - passed
            admitting &= slots > 0 and rows > 0 and not step.out_of_pages
            if index >= self.slots and (step.reserved_rows or not admitting):
                return
            shortage = self.cache_manager.shortage
            fits = admitting and not shortage.persists(sequence, step.sizes(sequence))
            blocked = sequence.request.images and self._lacks_features(sequence, step, fits)
            if step.reserved_rows and not step.rows_for(self._to_compute(sequence, step)):
                passed = True
            elif admitting and not blocked:
                admitting = fits and self._admit(sequence, step)

    def _in_turn(self) -> Iterator[Sequence]:
        yield from tuple(self._resuming)
        running = Counter(sequence.request.tenant for sequence in self.running)
        for _, sequence in self._arriving.in_turn(running):
            yield sequence

    def _lacks_features(self, sequence: Sequence, step: NextStep, admitting: bool) -> bool:
        """Whether a waiting sequence lacks features that its first chunk needs."""
        known = sequence.awaited
        if known is None or (admitting and not step.lacks_features(sequence, known)):
            start = self.cache_manager.cached_prefix(sequence) if sequence.shares_pages else 0
            known = self.cache_manager.images_needed(sequence, start, start + self.step_tokens)
            # Computed again on admission: cached pages change.
            sequence.awaited, sequence.prefix_hit = known, start
        step.ahead += [ImageNeed(sequence, digest) for digest in known]
        return step.lacks_features(sequence, known)

    def _admit(self, sequence: Sequence, step: NextStep) -> bool:
        if sequence.pending:  # preempted, and its last token is still on the device only
            return False
        hit, shared = self.cache_manager.adopt(sequence) if sequence.shares_pages else (0, [])
        sequence.launched = sequence.confirmed = sequence.prefix_hit = hit
        count, grants = self._chunk_tokens(sequence, step), None
        if count and self._may_stay(sequence):
            grants = self.cache_manager.reserve(sequence, hit + count)
        if grants is None:
            self.cache_manager.release(sequence)
            sequence.launched = sequence.confirmed = 0
            if count:
                sizes = step.sizes(sequence)
                self.cache_manager.shortage.note(sequence, sequence.page_keys, sizes)
            return False
        if sequence.resumes:
            self._resuming.remove(sequence)
        else:
            request = sequence.request
            self._arriving.serve(request.tenant, sequence, request.priority)
        self.running.append(sequence)
        sequence.state = SequenceState.RUNNING
        sequence.slot = slot = self._free_slots.pop()
        if sequence.epoch == 0:
            sequence.cached = min(hit, len(sequence.request.prompt))
        step.slot_loads.append(slot_load(sequence, slot))
        self._launch(sequence, count, shared + grants, step)
        return True

    def _may_stay(self, sequence: Sequence) -> bool:
        """False if it would be preempted again, because only its first chunks have pages."""
        end = min(sequence.length, sequence.most_tokens - 1)
        manager = self.cache_manager
        return not sequence.epoch or manager.has_room(sequence, end, in_flight=self.step_tokens)

    def _chunk_tokens(self, sequence: Sequence, step: NextStep) -> int:
        """Length of the sequence's chunk in this step; 0 for none."""
        start, length = sequence.launched, sequence.length
        if length >= sequence.most_tokens:
            length = sequence.most_tokens - 1
        if length <= start or sequence.waits_for_token:
            return 0
        late = sequence.late_mask
        if late is not None and not late.ready() and not step.waits_for_masks:
            step.lacks_mask = True
            return 0
        rows, count = step.budget - step.stream_rows, length - start
        if count > 1:
            most = step.rows_for(count)
            if count > most > 0 and not step.gives_way(count):
                most -= self._leave_to_shorter(sequence, count, most, step)
            rows = min(rows, most and max(most, sequence.least_tokens))
        end = start + min(count, rows)
        count = self.cache_manager.chunk_end(sequence, start, end) - start
        if not sequence.spans:
            return count
        count = step.cut_to_features(sequence, sequence.cut_to_whole_images(count))
        return self._cut_to_image_rows(sequence, count, step)

    def _leave_to_shorter(self, sequence: Sequence, count: int, rows: int, step: NextStep) -> int:
        """How many of its `rows` a prompt with `count` tokens to compute leaves to much shorter
        prompts behind it, which would wait for all of it: at most half. Only they may use these."""
        left, most = 0, rows // 2
        for remaining in self._shorter_behind(sequence, count // SHORTER, step):
            left = min(left + remaining, most)
            if left == most:
                break
        if left:
            step.reserved_rows, step.reserved_for = left, count // SHORTER
        return left

    def _shorter_behind(self, sequence: Sequence, most: int, step: NextStep) -> Iterator[int]:
        """The tokens to compute of each prompt behind this one that the next step can compute, if
        they are at most `most`: of running prompts, and of waiting ones for which there are slots
        and perhaps pages. None overtakes one of higher priority, or takes its slot."""
        behind, slots = list[Sequence](), len(self._free_slots) - (sequence.slot is None)
        if sequence.slot is not None:
            running = islice(self.running, self.running.index(sequence) + 1, None)
            behind += (each for each in running if each.remaining > 1)
        if slots and not step.out_of_pages:
            waiting = (each for each in self._in_turn() if each is not sequence)
            behind += islice(waiting, self.slots)
        priority, shortage = sequence.request.priority, self.cache_manager.shortage
        passed = False
        for other in behind:
            if other.request.priority > priority or not self._has_features(other, step):
                continue
            remaining = self._to_compute(other, step)
            if remaining > most:
                priority = min(priority, other.request.priority)
                passed |= other.slot is None
                continue
            if other.slot is None:
                slots -= 1
                if slots < passed or other.pending or shortage.persists(other, step.sizes(other)):
                    return
            yield remaining

    def _to_compute(self, sequence: Sequence, step: NextStep) -> int:
        """The number of tokens to compute; for a waiting sequence without those that were cached at
        its last look-up. A step looks up at most one sequence, since that may take long."""
        if sequence.slot is not None or not sequence.shares_pages:
            return sequence.remaining
        if sequence.prefix_hit is None and not step.has_looked_up:
            step.has_looked_up = True
            sequence.prefix_hit = self.cache_manager.cached_prefix(sequence)
        return sequence.remaining - (sequence.prefix_hit or 0)

    def _has_features(self, sequence: Sequence, step: NextStep) -> bool:
        """Whether the features of its next chunk's images are ready, as far as that is known."""
        awaited = sequence.awaited
        if sequence.state is SequenceState.RUNNING:
            begin = sequence.launched
            awaited = self.cache_manager.images_needed(sequence, begin, begin + 1)
        return not sequence.spans or (awaited is not None and all(map(step.ready, awaited)))

    def _cut_to_image_rows(self, sequence: Sequence, count: int, step: NextStep) -> int:
        """`count` tokens, fewer if the step would fill too many image rows or lack features."""
        start, end = sequence.launched, sequence.launched + count
        images = reversed(images_within(sequence.spans, start, end))
        for stop in (end, *(image.start for image in images if start < image.start)):
            needed = self.cache_manager.images_needed(sequence, start, stop)
            rows = self.cache_manager.image_rows(sequence, start, stop)
            if rows <= step.image_rows and all(map(step.ready, needed)):
                return stop - start
        return 0

    def _needs(self, sequence: Sequence, start: int, end: int) -> list[ImageNeed]:
        needed = self.cache_manager.images_needed(sequence, start, end)
        return [ImageNeed(sequence, digest) for digest in needed]

    def _launch(
        self, sequence: Sequence, count: int, grants: list[PageGrant], step: NextStep
    ) -> None:
        assert sequence.slot is not None
        start, end = sequence.launched, sequence.launched + count
        tokens, length = sequence.tokens, sequence.length
        samples, feedback = end == length, start >= len(tokens)
        assert not feedback or count == 1
        known = () if feedback else tuple(tokens[start:end])
        assert feedback or len(known) == count
        slot, scores = sequence.slot, sequence.scores_in(start, end)
        step.chunks.append(
            Chunk(sequence, sequence.epoch, slot, start, count, known, feedback, samples, scores)
        )
        if grants:
            step.page_writes += [PageWrite(g.group, slot, g.index, g.page) for g in grants]
        self.cache_manager.checkpoint(sequence, start)
        step.take(count, remaining=length - start)
        if sequence.spans:
            step.used += self._needs(sequence, start, end)
            step.image_rows -= self.cache_manager.image_rows(sequence, start, end)
        sequence.launched = end
        sequence.pending += samples

    def _launch_proposed(self, sequence: Sequence, tokens: tuple[int, ...], step: NextStep) -> None:
        """Add a chunk for each proposed token, after the chunk with the sequence's last token."""
        assert sequence.slot is not None and sequence.launched == len(sequence.tokens)
        for start, token in enumerate(tokens, sequence.launched):
            place = (sequence, sequence.epoch, sequence.slot, start)
            step.proposals.append(Chunk(*place, 1, (token,), False, True, proposed=True))
        step.chunks += step.proposals[-len(tokens) :]
        step.budget -= len(tokens)
        sequence.proposing = len(tokens)
        self.proposed_tokens += len(tokens)
        self.drafted_tokens += len(tokens) * sequence.drafted

    def _preempt(self, sequence: Sequence) -> None:
        """Release the slot and pages of a running sequence; its sampled tokens stay valid."""
        self.preemptions += 1
        self._wait(sequence)

    def _shift(self, sequence: Sequence) -> None:
        """Drop tokens of a full context; the others move or are computed again."""
        assert not sequence.pending, "a full context has no room for more tokens"
        if sequence.moving_cut is not None:
            moved = self.cache_manager.shift(sequence, sequence.moving_cut)
            if moved is None:
                self._preempt(sequence)
                return
            self._moved[sequence] = moved
        elif sequence.state is SequenceState.RUNNING:
            self._wait(sequence)
        self.shifts += 1
        sequence.shift()

    def _wait(self, sequence: Sequence) -> None:
        """Return a running sequence to the head of the queue."""
        self._leave_slot(sequence)
        sequence.state = SequenceState.WAITING
        sequence.restart()
        self._resuming.appendleft(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.cache_manager.release(sequence)
        self._moved.pop(sequence, None)
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None


def _is_right(chunk: Chunk) -> bool:
    """Whether the last token of the sequence is the proposed token at the proposed position."""
    tokens = chunk.sequence.tokens
    return len(tokens) == chunk.start + 1 and tokens[-1] == chunk.known[0]
