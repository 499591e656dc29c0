"""How many prompt tokens a step may compute so that the gaps of running streams stay short."""

from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import StepPlan

# Prompt tokens of a step at least, so that prompts are computed whatever the target is.
LEAST_TOKENS = 16
# Factor by which each step reduces the weight of the earlier ones.
MEMORY = 0.8
DELAY_MEMORY = 0.95
# A step may have so many times the prompt tokens of the largest recent one: the time of a small
# step says little about that of a large one.
GROWTH = 2.0
# The aim is below the target by this multiple of the mean relative delay, of which the 99th
# percentile of normally distributed times is 5.8 times.
DELAYS = 6.0
MARGINS = (0.06, 0.5)


class StepBudget:
    """Measures steps; times in nanoseconds of one clock.

    The time of a step is modelled as that of a step without prompts, as recently measured, and a
    time for each prompt token. The budget is what fits into `target_ns` with a margin for the
    recent delays, never less than `LEAST_TOKENS`. A wrong model is corrected by what is measured
    next: if steps take longer than the target, the time of a token is measured as longer too.
    """

    def __init__(self, target_ns: int, *, step_tokens: int) -> None:
        assert target_ns > 0
        self._target_ns = target_ns
        self._least, self._most = min(LEAST_TOKENS, step_tokens), step_tokens
        self._base_ns = 0.0  # of a step without prompts
        self._tokens = self._tokens_ns = 0.0  # of prompts, and the time that they have added
        self._delay = 0.0  # mean, relative to what was expected
        self._largest = 0.0  # prompt tokens of the recent steps
        self._retired_ns = 0
        self._retired: frozenset[Sequence] = frozenset()  # in the last step

    @property
    def prompt_tokens(self) -> int:
        """For a step that also has streams."""
        margin = min(max(MARGINS[0], DELAYS * self._delay), MARGINS[1])
        room_ns = self._target_ns * (1 - margin) - self._base_ns
        reach = GROWTH * self._largest
        fitting = min(reach, room_ns * self._tokens / max(1.0, self._tokens_ns))
        return min(self._most, max(self._least, int(fitting)))

    def observe(self, plan: StepPlan, took_ns: int, now_ns: int) -> None:
        """A step has ended; `took_ns`: without the time between steps, which streams wait too."""
        if any(chunk.length == 1 and chunk.sequence in self._retired for chunk in plan.chunks):
            took_ns = now_ns - self._retired_ns
        self._retired_ns = now_ns
        self._retired = frozenset(chunk.sequence for chunk in plan.chunks)
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
