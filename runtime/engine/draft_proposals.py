"""Proposals of a draft model: which sequences draft, and how many tokens."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from runtime.engine.acceptance import LEAST_GAIN, LONGEST_PAUSE, SHORTEST_PAUSE, Acceptance
from runtime.engine.drafter import Drafter
from runtime.engine.sequence import Sequence
from runtime.engine.step_yield import ProposalCandidate, StepYield

_KEPT_DELAY = 0.9  # each new sequence multiplies the delay of the next one by this factor


@dataclass(slots=True)
class _Record:
    """State of a sequence while it has its slot."""

    epoch: int
    acceptance: Acceptance = field(default_factory=Acceptance)


class DraftProposals:
    """All sequences draft in the same steps of the draft model, so the length of the drafts and
    the sequences that take part are chosen together, to maximise tokens per unit of time.

    `most`: maximum length of a proposal. While drafts do not pay off, new sequences start to draft
    later. Each starts a little earlier than the one before it, because answers that are shorter
    than the delay would never show whether drafts pay off again.
    """

    def __init__(self, drafter: Drafter, *, most: int) -> None:
        self.drafter, self._most = drafter, most
        self._records: WeakKeyDictionary[Sequence, _Record] = WeakKeyDictionary()
        self._delay = 0  # tokens that a new sequence generates before its first draft
        self._running = 0  # running sequences

    def keep(self, running: Several[Sequence]) -> None:
        """Release the draft model's state of all other sequences."""
        self.drafter.keep(running)

    def propose(self, running: Several[Sequence], step: StepYield) -> None:
        """Draft for sequences without proposals. A sequence whose last token is only on the device
        is marked to wait for it (`waits_to_propose`)."""
        if not step.costs.measured:  # the benefit of a draft is unknown
            return
        found = (self._candidate(sequence, step) for sequence in running)
        candidates = [each for each in found if each is not None]
        candidates.sort(key=lambda each: each.acceptance.chance, reverse=True)
        self._running = len(running)
        depth, chosen = self._chosen(candidates[: max(0, step.room)], step)
        wanted: dict[Sequence, int] = {}
        for each in chosen:
            if each.sequence.pending:
                each.sequence.waits_to_propose = True
            else:
                wanted[each.sequence] = min(depth, each.most)
        if not wanted:
            return
        drafts = self.drafter.draft(wanted)
        for each in chosen:
            if each.sequence in drafts:
                self._set(each, drafts[each.sequence])

    def _candidate(self, sequence: Sequence, step: StepYield) -> ProposalCandidate | None:
        if sequence.proposed or sequence.waits_to_propose or not sequence.may_propose:
            return None
        acceptance, length = self._record(sequence).acceptance, len(sequence.tokens)
        if acceptance.review(sequence.tokens, self._most):
            self._delay //= 2
        room = min(sequence.most_tokens - sequence.length - 1, self.drafter.room(sequence))
        most = min(acceptance.most, step.room, room)
        if most <= 0 or length < acceptance.paused_until:
            return None
        return ProposalCandidate(sequence, acceptance, most)

    def _chosen(
        self, candidates: list[ProposalCandidate], step: StepYield
    ) -> tuple[int, list[ProposalCandidate]]:
        """The length of the drafts, and the sequences that draft. Candidates with low acceptance
        are left out where that yields more; those for which drafting would not pay off even alone
        start a pause. `candidates`: sorted by acceptance, highest first."""
        while candidates:
            depth, rate = self._best(candidates, step)
            if rate >= LEAST_GAIN * self._rate(candidates, 0, step):
                *others, last = candidates
                if others and self._rate(others, depth, step) > rate:
                    self._leave_out(last, step)
                    candidates = others
                return depth, candidates
            half = len(candidates) // 2
            for each in candidates[half:]:
                self._leave_out(each, step)
            candidates = candidates[:half]
        return 0, []

    def _leave_out(self, candidate: ProposalCandidate, step: StepYield) -> None:
        costs, acceptance = step.costs, candidate.acceptance
        gains = (
            acceptance.expected(count) / (costs.of(1 + count) + count * self.drafter.costs.of(1))
            for count in range(1, candidate.most + 1)
        )
        if max(gains) * costs.of(1) < LEAST_GAIN:
            acceptance.rest(len(candidate.sequence.tokens))
            self._delay = min(max(2 * self._delay, SHORTEST_PAUSE), LONGEST_PAUSE)

    def _best(self, candidates: list[ProposalCandidate], step: StepYield) -> tuple[int, float]:
        """The draft length with the most expected tokens per unit of time, and that rate."""
        deepest = max(each.most for each in candidates)
        rates = [self._rate(candidates, depth, step) for depth in range(deepest + 1)]
        return rates.index(max(rates)), max(rates)

    def _rate(self, candidates: list[ProposalCandidate], depth: int, step: StepYield) -> float:
        """Expected tokens per unit of time if each candidate drafts up to `depth` tokens; 0 if the
        step has too few rows."""
        counts = [min(depth, each.most) for each in candidates]
        if sum(counts) > step.room:
            return 0.0
        # Steps do not overlap while all sequences draft.
        share = 1.0 if len(candidates) == self._running else step.share
        tokens = step.tokens
        for each, count in zip(candidates, counts, strict=True):
            if count:
                tokens += each.acceptance.expected(count) * share - 1
        drafting = sum(
            self.drafter.costs.of(sum(count > number for count in counts))
            for number in range(depth)
        )
        return tokens / (step.costs.of(step.rows + sum(counts)) + drafting)

    def _set(self, candidate: ProposalCandidate, draft: tuple[int, ...]) -> None:
        tokens, acceptance = candidate.sequence.acceptable(draft), candidate.acceptance
        if not tokens:
            acceptance.miss()
            return
        acceptance.propose(tokens, len(candidate.sequence.tokens))
        candidate.sequence.propose(tokens, drafted=True)

    def _record(self, sequence: Sequence) -> _Record:
        found = self._records.get(sequence)
        if found is None or found.epoch != sequence.epoch:
            found = self._records[sequence] = _Record(sequence.epoch)
            found.acceptance.paused_until = len(sequence.tokens) + self._delay
            self._delay = int(_KEPT_DELAY * self._delay)
        return found
