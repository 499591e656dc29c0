"""Speculative decoding: which tokens to propose for the next step, if any.

A step computes a row for each proposed token besides the row that samples anyway. Sampling depends
on seed and position only, so proposals change how many tokens a step yields, never which ones.
"""

from collections.abc import Sequence as Several

from runtime.engine.draft_proposals import DraftProposals
from runtime.engine.ngram_proposals import NGramProposals
from runtime.engine.sequence import Sequence
from runtime.engine.step_costs import StepCosts
from runtime.engine.step_plan import StepPlan
from runtime.engine.step_yield import StepYield


class Speculation:
    """Proposes tokens for running sequences before each plan: by prompt lookup (`ngram`); with a
    draft model (`drafts`) for sequences in which that finds nothing.

    `draws`: maximum number of sampling rows of a step. `overlaps`: see `StepYield`.
    """

    def __init__(
        self,
        *,
        draws: int,
        overlaps: bool,
        ngram: NGramProposals | None = None,
        drafts: DraftProposals | None = None,
    ) -> None:
        self._draws, self._overlaps = draws, overlaps
        self._ngram, self._drafts = ngram, drafts
        self._costs = StepCosts()

    def observe(self, plan: StepPlan, duration_ns: int) -> None:
        """Record the duration of a retired step. Steps with prompts do not count."""
        rows = len(plan.chunks)
        if sum(chunk.length for chunk in plan.chunks) == rows:
            self._costs.observe(rows, duration_ns)

    def propose(self, running: Several[Sequence], *, joining: int) -> None:
        """Set the proposals of the sequences for the next plan, or make them wait until the host
        knows their last token. `joining`: number of sequences that the plan may admit."""
        for sequence in running:
            sequence.propose(())
        if self._drafts is not None:
            self._drafts.keep(running)
        rows = len(running)
        if not rows or self._costs.needs(rows):
            return
        room = self._draws - rows - joining
        step = StepYield(self._costs, rows, rows, room, self._overlaps)
        if self._ngram is not None:
            self._ngram.propose(running, step)
        if self._drafts is not None:
            self._drafts.propose(running, step)
