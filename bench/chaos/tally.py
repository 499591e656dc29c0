"""The outcome of the streams, and the faults that were injected."""

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Each started stream ends as exactly one of: finished, cut, broken.

    `cut`: its client was connected to the killed process; the client retried and received the whole
    answer, at most `longest_return_s` later. A gap is the time that a surviving stream was without
    output, with the kind of process that was killed last.
    """

    started: int = 0
    finished: int = 0
    cut: int = 0
    reasons: list[str] = field(default_factory=list)  # one for each that is broken
    killed: Counter[str] = field(default_factory=Counter)
    last_killed: str = "nothing"
    longest_gap: tuple[float, str] = (0.0, "nothing")  # and what had been killed last
    longest_return_s: float = 0.0
    cuts_until: float = 0.0  # on the monotonic clock: cuts are expected until then

    @property
    def broken(self) -> int:
        return len(self.reasons)

    def expect_cuts(self, seconds: float) -> None:
        self.cuts_until = max(self.cuts_until, time.monotonic() + seconds)

    def note_killed(self, kind: str) -> None:
        self.killed[kind] += 1
        self.last_killed = kind

    def note_finished(self, gaps: list[tuple[float, str]]) -> None:
        self.finished += 1
        self.longest_gap = max((self.longest_gap, *gaps))

    def note_cut(self, return_s: float) -> None:
        self.cut += 1
        self.longest_return_s = max(self.longest_return_s, return_s)

    def page(self) -> str:
        killed = ", ".join(f"{count} {what}" for what, count in sorted(self.killed.items()))
        lines = [
            f"killed           {killed or 'nothing'}",
            f"streams started  {self.started}",
            f"        finished {self.finished}",
            f"        cut      {self.cut} with the ingress or proxy that held their connection; "
            f"all retries were answered, at most {self.longest_return_s:.1f} s later",
            f"        broken   {self.broken}",
            f"longest gap      {self.longest_gap[0]:.2f} s, in a surviving stream; killed last: "
            f"{self.longest_gap[1]}",
            *(f"broken: {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)
