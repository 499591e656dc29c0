"""A smaller model of the same vocabulary that samples what may follow the ends of sequences.

It samples with the parameters and the random numbers of the sequences, so that it draws the same
tokens where both models agree. Its runner, its pages and their prefix cache are its own; a sequence
has the same slot in both. What it computes influences the number of tokens of a step, never which.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from runtime.engine.request import GenerationRequest, Sampled, StopRules
from runtime.engine.sequence import Sequence
from runtime.engine.step_costs import StepCosts
from runtime.engine.step_plan import Chunk, PageWrite, Runner, SlotLoad, StepPlan
from runtime.kv.cache_manager import KVCacheManager, PageGrant

_NEAR = 2  # tokens that a drafting step may begin with: the last drafted one, and one more


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Of the draft model's steps: rows in total, and those that may draw. `context_tokens`: of a
    sequence; `written_tokens`: of a sequence in a step, without loading its slot again.
    `vocab_size` of the draft model, `target_vocab_size` of the one that it drafts for: ids from the
    smaller one on are not shared. `depth`: steps in flight."""

    step_tokens: int
    draws: int
    context_tokens: int
    written_tokens: int
    vocab_size: int
    target_vocab_size: int
    depth: int = 1


@dataclass(eq=False, slots=True)
class _Draft:
    """What the draft model has of a sequence. `own`: its tokens, of which the first `verified` are
    the sequence's, and its pages. `foreign`: the sequence has tokens that the model has not."""

    own: Sequence
    slot: int
    epoch: int  # of the sequence
    verified: int
    written: int | None = None  # the first tokens that its slot has; None before it is loaded
    count: int = 0  # of the draft in progress
    drawn: list[int] = field(default_factory=list)
    foreign: bool = False

    @property
    def behind(self) -> int:
        """Verified tokens that are not computed."""
        return self.verified - self.own.launched


class Drafter:
    """`costs`: the durations of its decode steps."""

    def __init__(
        self,
        runner: Runner,
        cache_manager: KVCacheManager,
        limits: DraftLimits,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.costs = StepCosts()
        self.cache_manager = cache_manager
        self._runner, self._limits, self._clock = runner, limits, clock
        self._drafts: dict[Sequence, _Draft] = {}
        self._page_writes: list[PageWrite] = []  # of the next step
        self._mark = 0  # when the last step ended

    def room(self, sequence: Sequence) -> int:
        """The most tokens that can be drafted for a sequence; 0 for one with images."""
        draft = self._drafts.get(sequence)
        if sequence.spans or (draft is not None and draft.foreign):
            return 0
        return self._limits.context_tokens - sequence.length

    def keep(self, running: Several[Sequence]) -> None:
        """Release the pages of other sequences, and of those that have begun anew."""
        if not self._drafts:
            return
        epochs = {sequence: sequence.epoch for sequence in running}
        for sequence, draft in list(self._drafts.items()):
            if epochs.get(sequence) != draft.epoch:
                self._release(sequence)

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """So many tokens after the ends of running sequences, whose tokens are all known; waits for
        the device. Fewer if one cannot be sampled. Sequences are left out while more of their
        tokens have to be computed first than one step can, and without pages."""
        drafts = {sequence: self._synchronised(sequence) for sequence in wanted}
        self._catch_up(list(drafts.values()), wanted)
        ready, draws = dict[Sequence, _Draft](), self._limits.draws
        for sequence, draft in drafts.items():
            if draft.behind <= draws and self._begins(draft, wanted[sequence], wanted):
                ready[sequence] = draft
                draws -= draft.behind
        if ready:
            self._sample(list(ready.values()))
        shared = min(self._limits.vocab_size, self._limits.target_vocab_size)
        return {sequence: _before(draft.drawn, shared) for sequence, draft in ready.items()}

    def _synchronised(self, sequence: Sequence) -> _Draft:
        """The draft of a sequence, with its tokens."""
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
        tokens = list(sequence.tokens)
        request = GenerationRequest(
            sequence.request.id,
            (),
            StopRules(1),
            replace(sequence.sampling, logprobs=None),
            cache_salt=sequence.cache_salt,
        )
        own = Sequence(request, tokens)
        hit, shared = self.cache_manager.adopt(own)
        own.launched = own.confirmed = hit
        draft = _Draft(own, sequence.slot, sequence.epoch, len(tokens))
        draft.foreign = any(token >= self._limits.vocab_size for token in tokens)
        self._note(draft, shared)
        return draft

    def _catch_up(self, drafts: Several[_Draft], kept: Mapping[Sequence, int]) -> None:
        """One step for what has to be computed before the last tokens of the sequences."""
        crowded = sum(min(draft.behind, _NEAR) for draft in drafts) > self._limits.draws
        rows, chunks = self._limits.step_tokens, list[Chunk]()
        for draft in drafts:
            own, count = draft.own, min(draft.behind - 1, rows)
            far = draft.behind > _NEAR or (crowded and draft.behind > 1)
            end = own.launched + count
            if draft.foreign or not far or not count or not self._reserve(draft, end, kept):
                continue
            chunks.append(_known(draft, own.launched, end, samples=False))
            rows -= count
        if not chunks:
            return
        self._runner.collect(self._launch(chunks))
        for chunk in chunks:
            own = chunk.sequence
            own.launched = own.confirmed = chunk.start + chunk.length
            self._settle(own)

    def _begins(self, draft: _Draft, count: int, kept: Mapping[Sequence, int]) -> bool:
        """Whether the draft can be made now: `count` tokens, of which the last is not computed."""
        draft.count, draft.drawn = count, []
        near = draft.behind <= _NEAR and not draft.foreign
        return near and self._reserve(draft, draft.verified + count - 1, kept)

    def _sample(self, drafts: Several[_Draft]) -> None:
        """All drafts, a token of each in a step."""
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
                # The row before the last known token has drawn another one into its place.
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
        """Also uploads the tokens that the slots lack."""
        loads, writes = [], []
        slots = {chunk.slot for chunk in chunks}
        for draft in (each for each in self._drafts.values() if each.slot in slots):
            begin, end = draft.written, draft.verified
            if begin is None or end - begin > self._limits.written_tokens:
                tokens = tuple(draft.own.tokens[:end])
                loads.append(SlotLoad(draft.slot, tokens, draft.own.sampling))
            elif end > begin:
                writes.append(_known(draft, begin, end, samples=False))
            draft.written = end
        page_writes, self._page_writes = tuple(self._page_writes), []
        return self._runner.launch(
            StepPlan(tuple(chunks), page_writes, tuple(loads), proposals=tuple(writes))
        )

    def _reserve(self, draft: _Draft, end: int, kept: Mapping[Sequence, int]) -> bool:
        """Pages for positions up to `end`, if necessary those of sequences that are not `kept`."""
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
        """What is computed may serve other sequences, and what no later row sees is released."""
        self.cache_manager.publish(own)
        self.cache_manager.trim(own)

    def _release(self, sequence: Sequence) -> None:
        draft = self._drafts.pop(sequence)
        self.cache_manager.release(draft.own)
        self._page_writes = [w for w in self._page_writes if w.slot != draft.slot]


def _known(draft: _Draft, begin: int, end: int, *, samples: bool) -> Chunk:
    tokens = tuple(draft.own.tokens[begin:end])
    return Chunk(draft.own, 0, draft.slot, begin, end - begin, tokens, False, samples)


def _rows(draft: _Draft, number: int) -> list[Chunk]:
    """Of the step with that number: the last known tokens, in chunks of one row each, since such
    steps are recorded; then the token drawn last."""
    if number == 0:
        begin, end = draft.own.launched, draft.verified
        return [_known(draft, each, each + 1, samples=True) for each in range(begin, end)]
    place = draft.verified + number - 1
    return [Chunk(draft.own, 0, draft.slot, place, 1, (), True, True)]


def _before(tokens: Several[int], size: int) -> tuple[int, ...]:
    """The first tokens, up to one that is outside a vocabulary of `size` tokens."""
    return tuple(takewhile(lambda token: token < size, tokens))
