"""A smaller model of the same vocabulary that samples likely continuations of sequences.

It uses each sequence's sampling parameters and random numbers, so it draws the same tokens where
both models agree. It has its own runner, pages and prefix cache; a sequence has the same slot in
both models. Drafts change how many tokens a step yields, never which tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from runtime.engine.request import GenerationRequest, Sampled, SamplingParams, StopRules
from runtime.engine.sequence import Sequence
from runtime.engine.step_budget import StepBudget
from runtime.engine.step_costs import StepCosts
from runtime.engine.step_plan import Chunk, PageWrite, Runner, SlotLoad, StepPlan
from runtime.kv.cache_manager import KVCacheManager, PageGrant

# At most this many uncomputed tokens are computed by the first drafting step itself: the last
# token of an accepted draft and the token sampled after it. More need a step before it.
_NEAR = 2


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of the draft model's steps.

    `step_tokens`: rows of a step; `draws`: rows of a step that may sample. `context_tokens`: length
    of a sequence. `written_tokens`: tokens of a sequence that a step can write to its slot; more
    need a `SlotLoad`. `vocab_size`: of the draft model; `target_vocab_size`: of the model it drafts
    for; only ids below both are shared. `depth`: steps in flight."""

    step_tokens: int
    draws: int
    context_tokens: int
    written_tokens: int
    vocab_size: int
    target_vocab_size: int
    depth: int = 1


@dataclass(eq=False, slots=True)
class _Draft:
    """The draft model's state of a sequence.

    `own`: the draft model's sequence, with its tokens and pages; its first `verified` tokens equal
    those of the target's sequence. `foreign`: the sequence has token ids outside the draft model's
    vocabulary, or only such ids may follow, so it cannot draft."""

    own: Sequence
    slot: int
    epoch: int  # of the target's sequence
    verified: int
    written: int | None = None  # number of tokens in its slot; None before it is loaded
    count: int = 0  # tokens of the draft in progress
    drawn: list[int] = field(default_factory=list)
    foreign: bool = False

    @property
    def behind(self) -> int:
        """Number of verified tokens that the draft model has not computed."""
        return self.verified - self.own.launched


class Drafter:
    """Drafts tokens with the draft model. `costs`: durations of its decode steps, in ns of `clock`.

    `budget`: of the target's steps. Durations of drafts are reported to it. It limits the prompt
    tokens that the draft model computes before a draft, as if they took as long as the target's.
    """

    def __init__(
        self,
        runner: Runner,
        cache_manager: KVCacheManager,
        limits: DraftLimits,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        budget: StepBudget | None = None,
    ) -> None:
        self.costs = StepCosts()
        self.cache_manager = cache_manager
        self._runner, self._limits, self._clock = runner, limits, clock
        self._budget = budget
        self._drafts: dict[Sequence, _Draft] = {}
        self._page_writes: list[PageWrite] = []  # for the next step
        self._mark = 0  # end of the last step

    def room(self, sequence: Sequence) -> int:
        """The most tokens that can be drafted for a sequence; 0 for one with images."""
        draft = self._drafts.get(sequence)
        if sequence.spans or (draft is not None and draft.foreign):
            return 0
        return self._limits.context_tokens - sequence.length

    def keep(self, running: Several[Sequence]) -> None:
        """Release the pages of sequences that are not in `running` or have restarted since."""
        if not self._drafts:
            return
        epochs = {sequence: sequence.epoch for sequence in running}
        for sequence, draft in list(self._drafts.items()):
            if epochs.get(sequence) != draft.epoch:
                self._release(sequence)

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Draft `wanted[sequence]` tokens for each running sequence, whose tokens must all be known
        to the host; waits for the device.

        A draft is shorter if a token cannot be sampled. Sequences are missing in the result if one
        step cannot compute all of their missing tokens or no pages are free."""
        begun = self._clock()
        drafts = {sequence: self._synchronised(sequence) for sequence in wanted}
        self._catch_up(list(drafts.values()), wanted)
        ready, draws = dict[Sequence, _Draft](), self._limits.draws
        for sequence, draft in drafts.items():
            if draft.behind <= draws and self._begins(draft, wanted[sequence], wanted):
                ready[sequence] = draft
                draws -= draft.behind
        if ready:
            self._sample(list(ready.values()))
        if self._budget is not None:
            self._budget.note_drafts(self._clock() - begun)
        shared = min(self._limits.vocab_size, self._limits.target_vocab_size)
        return {sequence: _before(draft.drawn, shared) for sequence, draft in ready.items()}

    def _synchronised(self, sequence: Sequence) -> _Draft:
        """The draft state of a sequence, updated to its current tokens."""
        draft = self._drafts.get(sequence)
        if draft is None:
            draft = self._drafts[sequence] = self._admit(sequence)
        own, tokens, same = draft.own, sequence.tokens, draft.verified
        most = min(len(own.tokens), len(tokens))
        while same < most and own.tokens[same] == tokens[same]:
            same += 1
        new = tokens[same:]
        own.tokens[same:] = new
        own.launched = own.confirmed = min(own.launched, same, len(tokens) - 1)
        draft.verified = len(tokens)
        draft.written = None if draft.written is None else min(draft.written, same)
        size = self._limits.vocab_size
        draft.foreign = draft.foreign or any(token >= size for token in new)
        self._settle(own)
        return draft

    def _admit(self, sequence: Sequence) -> _Draft:
        assert sequence.slot is not None
        tokens, size = list(sequence.tokens), self._limits.vocab_size
        request = GenerationRequest(
            sequence.request.id,
            (),
            StopRules(1),
            _within(sequence.sampling, size),
            cache_salt=sequence.cache_salt,
        )
        own = Sequence(request, tokens)
        hit, shared = self.cache_manager.adopt(own)
        own.launched = own.confirmed = hit
        draft = _Draft(own, sequence.slot, sequence.epoch, len(tokens))
        allowed = own.sampling.allowed
        draft.foreign = any(token >= size for token in tokens) or bool(allowed and not any(allowed))
        self._note(draft, shared)
        return draft

    def _catch_up(self, drafts: Several[_Draft], kept: Mapping[Sequence, int]) -> None:
        """Compute the missing tokens before each sequence's last one in a single step."""
        crowded = sum(min(draft.behind, _NEAR) for draft in drafts) > self._limits.draws
        rows, chunks = self._limits.step_tokens, list[Chunk]()
        if self._budget is not None:
            rows = min(rows, self._budget.prompt_tokens)
        for draft in drafts:
            own, count = draft.own, min(draft.behind - 1, rows)
            far = draft.behind > _NEAR or (crowded and draft.behind > 1)
            end = own.launched + count
            if draft.foreign or not far or not count or not self._reserve(draft, end, kept):
                continue
            chunks.append(_known_chunk(draft, own.launched, end, samples=False))
            rows -= count
        if not chunks:
            return
        self._runner.collect(self._launch(chunks))
        for chunk in chunks:
            own = chunk.sequence
            own.launched = own.confirmed = chunk.start + chunk.length
            self._settle(own)

    def _begins(self, draft: _Draft, count: int, kept: Mapping[Sequence, int]) -> bool:
        """Whether `count` tokens can be drafted now. Their pages are reserved then; the last token
        is not computed and needs none."""
        draft.count, draft.drawn = count, []
        near = draft.behind <= _NEAR and not draft.foreign
        return near and self._reserve(draft, draft.verified + count - 1, kept)

    def _sample(self, drafts: Several[_Draft]) -> None:
        """Sample all drafts, one token of each per step."""
        flying: deque[tuple[list[Chunk], Any]] = deque()
        self._mark = self._clock()
        by_own = {draft.own: draft for draft in drafts}
        for number in range(max(draft.count for draft in drafts)):
            chunks = []
            for draft in drafts:
                if number < draft.count:
                    chunks += _rows(draft, number)
            flying.append((chunks, self._launch(chunks)))
            for draft in drafts if number == 0 else ():
                # With two rows, the first one's sample has overwritten the last known token in the
                # slot.
                draft.written = draft.verified - (draft.behind == _NEAR)
            if len(flying) >= self._limits.depth:
                self._collect(*flying.popleft(), by_own)
        while flying:
            self._collect(*flying.popleft(), by_own)
        for draft in drafts:
            own = draft.own
            own.tokens += draft.drawn
            if draft.written == draft.verified:
                draft.written = len(own.tokens)
            own.launched = draft.verified + draft.count - 1

    def _collect(
        self, chunks: list[Chunk], launched: Any, by_own: Mapping[Sequence, _Draft]
    ) -> None:
        results = self._runner.collect(launched)
        now = self._clock()
        self.costs.observe(len(chunks), now - self._mark)
        self._mark = now
        for chunk, result in zip(chunks, results, strict=True):
            draft = by_own[chunk.sequence]
            end = chunk.start + 1
            if end == draft.verified + len(draft.drawn) and isinstance(result, Sampled):
                draft.drawn.append(result.token)

    def _launch(self, chunks: list[Chunk]) -> Any:
        """Launch a step that also uploads the tokens that its slots lack."""
        loads, writes = [], []
        slots = {chunk.slot for chunk in chunks}
        for draft in (each for each in self._drafts.values() if each.slot in slots):
            begin, end = draft.written, draft.verified
            if begin is None or end - begin > self._limits.written_tokens:
                tokens = tuple(draft.own.tokens[:end])
                loads.append(SlotLoad(draft.slot, tokens, draft.own.sampling))
            elif end > begin:
                writes.append(_known_chunk(draft, begin, end, samples=False))
            draft.written = end
        page_writes, self._page_writes = tuple(self._page_writes), []
        return self._runner.launch(
            StepPlan(tuple(chunks), page_writes, tuple(loads), proposals=tuple(writes))
        )

    def _reserve(self, draft: _Draft, end: int, kept: Mapping[Sequence, int]) -> bool:
        """Reserve pages for positions below `end`, if necessary by releasing sequences that are not
        in `kept`. False if there are too few."""
        grants = self.cache_manager.reserve(draft.own, end)
        if grants is None:
            for sequence in [each for each in self._drafts if each not in kept]:
                self._release(sequence)
            grants = self.cache_manager.reserve(draft.own, end)
        if grants is not None:
            self._note(draft, grants)
        return grants is not None

    def _note(self, draft: _Draft, grants: Several[PageGrant]) -> None:
        self._page_writes += [PageWrite(g.group, draft.slot, g.index, g.page) for g in grants]

    def _settle(self, own: Sequence) -> None:
        """Add computed pages to the prefix cache; release those that no later row attends to."""
        self.cache_manager.publish(own)
        self.cache_manager.trim(own)

    def _release(self, sequence: Sequence) -> None:
        draft = self._drafts.pop(sequence)
        self.cache_manager.release(draft.own)
        self._page_writes = [w for w in self._page_writes if w.slot != draft.slot]


def _within(sampling: SamplingParams, size: int) -> SamplingParams:
    """The parameters without token ids outside a vocabulary of `size` tokens, which a model of that
    vocabulary neither reads nor draws. Without log-probabilities, which drafts do not need."""
    allowed = int.from_bytes(sampling.allowed, "little") & ((1 << size) - 1)
    return replace(
        sampling,
        logprobs=None,
        logit_bias=tuple(each for each in sampling.logit_bias if each[0] < size),
        barred=tuple(token for token in sampling.barred if token < size),
        allowed=allowed.to_bytes(4 * -(-size // 32), "little") if sampling.allowed else b"",
        bad_words=tuple(w for w in sampling.bad_words if all(token < size for token in w)),
    )


def _known_chunk(draft: _Draft, begin: int, end: int, *, samples: bool) -> Chunk:
    tokens = tuple(draft.own.tokens[begin:end])
    return Chunk(draft.own, 0, draft.slot, begin, end - begin, tokens, False, samples)


def _rows(draft: _Draft, number: int) -> list[Chunk]:
    """The rows of drafting step `number`. Step 0 computes the last known tokens, as chunks of one
    row, because only steps of such chunks are recorded; later ones compute the last drawn token."""
    if number == 0:
        begin, end = draft.own.launched, draft.verified
        return [_known_chunk(draft, each, each + 1, samples=True) for each in range(begin, end)]
    place = draft.verified + number - 1
    return [Chunk(draft.own, 0, draft.slot, place, 1, (), True, True)]


def _before(tokens: Several[int], size: int) -> tuple[int, ...]:
    """The tokens before the first one that is outside a vocabulary of `size` tokens."""
    return tuple(takewhile(lambda token: token < size, tokens))
