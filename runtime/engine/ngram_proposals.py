"""Speculation by prompt lookup: proposes what followed earlier occurrences of the last tokens."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from runtime.engine.acceptance import Acceptance
from runtime.engine.ngram_index import NGramIndex
from runtime.engine.sequence import Sequence
from runtime.engine.step_yield import ProposalCandidate, StepYield

INDEXED_TOKENS = 1024  # one step adds at most this many tokens to the indices of all sequences


@dataclass(slots=True)
class _Record:
    """State of a sequence while it has its slot."""

    epoch: int
    index: NGramIndex
    acceptance: Acceptance = field(default_factory=Acceptance)
    waited: bool = False  # whether the sequence skipped a step in order to propose


class NGramProposals:
    """Finds and sets the proposals of each step. `most`: maximum length of a proposal."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._records: WeakKeyDictionary[Sequence, _Record] = WeakKeyDictionary()

    def propose(self, running: Several[Sequence], step: StepYield) -> None:
        """Set the proposals of the sequences. A sequence whose last token is only on the device is
        marked to wait for it (`waits_to_propose`). What does not pay off is not proposed, but
        compared with the tokens that are sampled."""
        most = min(self._most, step.room)
        if most <= 0 or not step.could_gain(most):
            return
        places, found = INDEXED_TOKENS, []
        for sequence in running:
            record = self._record(sequence)
            places -= record.index.extend(places)
            if sequence.may_propose and (tokens := self._found(sequence, record, step.room)):
                found.append((sequence, record, tokens))
        candidates = [
            ProposalCandidate(sequence, record.acceptance, len(tokens))
            for sequence, record, tokens in found
        ]
        for (sequence, record, tokens), candidate, count in zip(
            found, candidates, step.divided(candidates), strict=True
        ):
            if count and not sequence.pending:
                step.take(candidate, count)
            self._set(sequence, record, tokens, count)

    def _found(self, sequence: Sequence, record: _Record, room: int) -> tuple[int, ...]:
        """The tokens that the sequence may propose."""
        acceptance = record.acceptance
        acceptance.review(sequence.tokens, self._most)
        room = min(acceptance.most, room, sequence.most_tokens - sequence.length - 1)
        tokens = sequence.acceptable(record.index.continuation(room)) if room > 0 else ()
        if record.waited and not tokens:
            acceptance.miss()
            record.waited = False
        return tokens

    def _set(
        self, sequence: Sequence, record: _Record, tokens: tuple[int, ...], count: int
    ) -> None:
        """Let the sequence propose the first `count` of its tokens."""
        if count and sequence.pending:
            sequence.waits_to_propose = record.waited = True
            return
        record.waited = False
        if count:
            sequence.propose(tokens[:count])
            record.acceptance.propose(tokens[:count], len(sequence.tokens))
        else:
            record.acceptance.withhold(tokens, len(sequence.tokens))

    def _record(self, sequence: Sequence) -> _Record:
        found = self._records.get(sequence)
        if found is None or found.epoch != sequence.epoch:
            index = NGramIndex(sequence.tokens, most_tokens=sequence.most_tokens)
            found = self._records[sequence] = _Record(sequence.epoch, index)
        return found
