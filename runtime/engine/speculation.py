"""Speculative decoding: which tokens to propose for the next step, and whether that pays.

A step computes rows for proposed tokens beside the row that samples anyway. Sampling depends on
seed and position only, so proposals change how many tokens a step yields, and never which.
"""

from collections.abc import Sequence as Several

from runtime.engine.draft_proposals import DraftProposals
from runtime.engine.ngram_proposals import NGramProposals
from runtime.engine.planned_step import PlannedStep
from runtime.engine.sequence import Sequence
from runtime.engine.step_costs import StepCosts
from runtime.engine.step_plan import StepPlan


class Speculation:
    """Proposes tokens for running sequences before each plan: `ngram`, what followed where their
    last tokens have occurred before; for the other sequences `drafts`, what a draft model samples.

    `draws`: rows of a step that may draw. `overlaps`: as of `PlannedStep`.
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
        """A retired step and its time. Steps with prompts do not count."""
        rows = len(plan.chunks)
        if sum(chunk.length for chunk in plan.chunks) == rows:
            self._costs.observe(rows, duration_ns)

    def propose(self, running: Several[Sequence], *, joining: int) -> None:
        """Set what the sequences propose for the next plan, or that they wait for their last token
        to propose. `joining`: sequences that the plan may admit."""
        for sequence in running:
            sequence.propose(())
        if self._drafts is not None:
            self._drafts.keep(running)
        rows = len(running)
        if not rows or self._costs.needs(rows):
            return
        room = self._draws - rows - joining
        step = PlannedStep(self._costs, rows, rows, room, self._overlaps)
        if self._ngram is not None:
            self._ngram.propose(running, step)
        if self._drafts is not None:
            self._drafts.propose(running, step)
