"""How many prompt tokens a step may compute so that the gaps of running streams stay short."""

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


class StepBudget:
    """Measures steps; times in nanoseconds of one clock.

    The duration of a step is modelled as that of recent steps without prompts plus a time per
    prompt token. The budget is the number of prompt tokens that fit into `target_ns`, less a margin
    for recent delays, and never less than `LEAST_TOKENS`. The model corrects itself: steps that
    exceed the target increase the measured time per token.
    """

    def __init__(self, target_ns: int, *, step_tokens: int) -> None:
        assert target_ns > 0
        self._target_ns = target_ns
        self._least, self._most = min(LEAST_TOKENS, step_tokens), step_tokens
        self._base_ns = 0.0  # duration of a step without prompts
        self._tokens = self._tokens_ns = 0.0  # recent prompt tokens, and the time they have added
        self._delay = 0.0  # mean delay, relative to the expected duration
        self._largest = 0.0  # most prompt tokens of a recent step
        self._retired_ns = 0
        self._retired: frozenset[Sequence] = frozenset()  # sequences of the last step

    @property
    def prompt_tokens(self) -> int:
        """The maximum number of prompt tokens of a step that also decodes."""
        margin = min(max(MARGINS[0], DELAYS * self._delay), MARGINS[1])
        room_ns = self._target_ns * (1 - margin) - self._base_ns
        reach = GROWTH * self._largest
        fitting = min(reach, room_ns * self._tokens / max(1.0, self._tokens_ns))
        return min(self._most, max(self._least, int(fitting)))

    def observe(self, plan: StepPlan, took_ns: int, now_ns: int) -> None:
        """Record the end of a step. `took_ns`: its duration, without the time since the previous
        step, which is added where streams waited for both."""
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
