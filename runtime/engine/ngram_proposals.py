"""Speculation by prompt lookup: proposes what followed earlier occurrences of the last tokens."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from runtime.engine.acceptance import LEAST_GAIN, Acceptance
from runtime.engine.ngram_index import NGramIndex
from runtime.engine.planned_step import PlannedStep
from runtime.engine.sequence import Sequence

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

    def propose(self, running: Several[Sequence], step: PlannedStep) -> None:
        """Set the proposals of the sequences. A sequence whose last token is only on the device is
        marked to wait for it (`waits_to_propose`). Nothing is proposed if that would not pay off
        even with all tokens accepted."""
        count = min(self._most, step.room)
        if count <= 0 or step.rate(count, count + 1) < LEAST_GAIN * step.rate(0, 1):
            return
        places = INDEXED_TOKENS
        for sequence in running:
            if step.room > 0:
                places -= self._propose_for(sequence, step, places)

    def _propose_for(self, sequence: Sequence, step: PlannedStep, places: int) -> int:
        """Returns the number of places that were indexed, of up to `places`."""
        record, length = self._record(sequence), len(sequence.tokens)
        indexed, acceptance = record.index.extend(places), record.acceptance
        if not sequence.may_propose:
            return indexed
        acceptance.review(sequence.tokens, self._most)
        room = min(acceptance.most, step.room, sequence.most_tokens - sequence.length - 1)
        if length < acceptance.paused_until or room <= 0:
            return indexed
        found = sequence.acceptable(record.index.continuation(room))
        if not found:
            if record.waited:
                acceptance.miss()
            record.waited = False
            return indexed
        rates = [step.rate(n, acceptance.expected(n)) for n in range(len(found) + 1)]
        count = rates.index(max(rates))
        if rates[count] < LEAST_GAIN * rates[0]:
            acceptance.rest(length)
        elif sequence.pending:
            sequence.waits_to_propose = record.waited = True
        else:
            sequence.propose(found[:count])
            acceptance.propose(found[:count], length)
            record.waited = False
            step.take(count, acceptance.expected(count))
        return indexed

    def _record(self, sequence: Sequence) -> _Record:
        found = self._records.get(sequence)
        if found is None or found.epoch != sequence.epoch:
            index = NGramIndex(sequence.tokens, most_tokens=sequence.most_tokens)
            found = self._records[sequence] = _Record(sequence.epoch, index)
        return found
