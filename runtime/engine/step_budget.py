"""How many prompt tokens a step may compute so that the gaps of running streams stay short."""

from collections import deque

from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import StepPlan

# Minimum number of prompt tokens of a step, so that prompts make progress with any target.
LEAST_TOKENS = 16
# Each step multiplies the weight of earlier ones by this factor.
MEMORY = 0.8
DELAY_MEMORY = 0.95
# A step may have this many times the prompt tokens of the largest recent one: the duration of a
# small step says little about that of a large one.
GROWTH = 2.0
# The margin below the target, in multiples of the mean relative delay. For normally distributed
# durations, the 99th percentile is at 5.8 times the mean delay.
DELAYS = 6.0
MARGINS = (0.06, 0.5)
# Number of steps over which the longest gap and the drafts within it are observed.
RECENT = 4


class StepBudget:
    """Measures steps; times in nanoseconds of one clock.

    The time of a step is modelled as that of a step without prompts, as recently measured, and a
    time for each prompt token. The budget is what fits into `target_ns` with a margin for the
    recent delays, never less than `LEAST_TOKENS`. A wrong model is corrected by what is measured
    next: if steps take longer than the target, the time of a token is measured as longer too.

    A gap also contains the steps of a draft model and, where a stream takes part in every other
    step only, another step.
    """

    def __init__(self, target_ns: int, *, step_tokens: int) -> None:
        assert target_ns > 0
        self._target_ns = target_ns
        self._least, self._most = min(LEAST_TOKENS, step_tokens), step_tokens
        self._base_ns = 0.0  # of a step without prompts
        self._tokens = self._tokens_ns = 0.0  # of prompts, and the time that they have added
        self._delay = 0.0  # mean, relative to what was expected
        self._largest = 0.0  # prompt tokens of the recent steps
        self._steps = self._retired_ns = 0
        self._latest: dict[Sequence, int] = {}  # the recent step in which it last took part
        self._spans = deque([1], RECENT)  # steps of the longest gap
        self._drafted_ns = 0  # by the draft model since the last step
        self._drafts_ns = deque([0], RECENT)  # before that, between two steps each

    @property
    def prompt_tokens(self) -> int:
        """The maximum number of prompt tokens of a step that also decodes."""
        margin = min(max(MARGINS[0], DELAYS * self._delay), MARGINS[1])
        steps = max(self._spans)
        gap_ns = self._target_ns * (1 - margin) - self._drafts_in_gap(steps)
        room_ns = gap_ns / steps - self._base_ns
        reach = GROWTH * self._largest
        fitting = min(reach, room_ns * self._tokens / max(1.0, self._tokens_ns))
        return min(self._most, max(self._least, int(fitting)))

    def _drafts_in_gap(self, steps: int) -> int:
        drafts = [*self._drafts_ns, self._drafted_ns]
        return max(sum(drafts[begin : begin + steps]) for begin in range(len(drafts)))

    def note_drafts(self, took_ns: int) -> None:
        """The draft model has computed since the last step ended."""
        self._drafted_ns += took_ns

    def observe(self, plan: StepPlan, took_ns: int, now_ns: int) -> None:
        """Record the end of a step. `took_ns`: its duration, without the time since the previous
        step, which is added where streams waited for both."""
        span = self._note_streams(plan)
        if span is not None:
            took_ns = now_ns - self._retired_ns - self._drafted_ns
            self._spans.append(span)
        self._drafts_ns.append(self._drafted_ns)
        self._retired_ns, self._drafted_ns = now_ns, 0
        prompts = sum(chunk.length for chunk in plan.chunks if chunk.length > 1)
        if not prompts:
            previous = self._base_ns or took_ns
            self._base_ns = MEMORY * previous + (1 - MEMORY) * took_ns
            return
        self._base_ns = min(self._base_ns, took_ns)
        if self._tokens:
            expected = self._base_ns + prompts * self._tokens_ns / self._tokens
            late = max(0.0, took_ns / max(1.0, expected) - 1)
            self._delay = DELAY_MEMORY * self._delay + (1 - DELAY_MEMORY) * late
        self._tokens = MEMORY * self._tokens + prompts
        self._tokens_ns = MEMORY * self._tokens_ns + took_ns - self._base_ns
        self._largest = max(prompts, MEMORY * self._largest)

    def _note_streams(self, plan: StepPlan) -> int | None:
        """The steps from when one of the streams last took part until now; None if all are new."""
        self._steps += 1
        earlier, begin = self._latest, self._steps - RECENT
        singles = {chunk.sequence for chunk in plan.chunks if chunk.length == 1}
        spans = (self._steps - earlier[each] for each in singles if each in earlier)
        self._latest = {each: step for each, step in earlier.items() if step > begin}
        self._latest |= {chunk.sequence: self._steps for chunk in plan.chunks}
        return max(spans, default=None)
