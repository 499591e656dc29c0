"""The outcome of the streams, and the faults that were injected."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.percentiles import percentile


@dataclass(slots=True)
class Fault:
    """An injected fault, and its effect on clients in seconds. `at`: on the monotonic clock.

    `gap_s`: the longest time without output of a stream that continued. `first_s`: the longest time
    from a request to the first output of its stream, queueing included. `return_s`: the longest
    time from the loss of a client's connection to the first output of its next request. `reply_s`:
    the longest time from the loss to the whole reply, for requests that are not streamed.
    """

    kind: str
    at: float
    gap_s: float = 0.0
    first_s: float = 0.0
    return_s: float = 0.0
    reply_s: float = 0.0


@dataclass(slots=True)
class Tally:
    """Counts streams. Each started stream ends as exactly one of finished, cut and broken.

    `cut`: its client was connected to the killed process; the client asked again and received the
    whole answer.
    """

    started: int = 0
    finished: int = 0
    cut: int = 0
    reasons: list[str] = field(default_factory=list)  # one for each broken stream
    spared: list[str] = field(default_factory=list)  # kinds that should have been killed
    faults: list[Fault] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    cuts_until: float = 0.0  # on the monotonic clock: cuts are expected until then

    @property
    def broken(self) -> int:
        return len(self.reasons)

    @property
    def passed(self) -> bool:
        """Whether no stream broke, and a process of each kind was killed."""
        return not (self.reasons or self.spared)

    @property
    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults}

    def expect_cuts(self, seconds: float) -> None:
        self.cuts_until = max(self.cuts_until, time.monotonic() + seconds)

    def note_fault(self, kind: str) -> None:
        """Notes a fault, and prints the effects of the previous one. Call it just before the
        fault."""
        if self.faults:
            print(self._line(self.faults[-1]), flush=True)
        self.faults.append(Fault(kind, time.monotonic()))

    def note_broken(self, reason: str) -> None:
        self.reasons.append(reason)
        print(f"{time.monotonic() - self.began:8.1f} broken: {reason}", flush=True)

    def note_gap(self, begin: float, end: float) -> None:
        if fault := self._cause(begin):
            fault.gap_s = max(fault.gap_s, end - begin)

    def note_first(self, begin: float, end: float) -> None:
        """Notes the first output of a stream whose request was sent at `begin`."""
        if fault := self._cause(begin):
            fault.first_s = max(fault.first_s, end - begin)

    def note_return(self, begin: float, end: float, *, streamed: bool) -> None:
        """Notes the first output of a repeated request after the connection was lost."""
        if fault := self._cause(begin):
            if streamed:
                fault.return_s = max(fault.return_s, end - begin)
            else:
                fault.reply_s = max(fault.reply_s, end - begin)

    def page(self) -> str:
        lines = [
            f"streams started  {self.started}",
            f"        finished {self.finished}",
            f"        cut      {self.cut}, with the process that held their connection; "
            "asked again and answered",
            f"        broken   {self.broken}",
            "seconds, as median / 95th percentile / longest over the faults of a kind",
            f"{'fault':<14}{'times':>6}   {'gap of a stream':<20}{'first output':<20}"
            f"{'second try begins':<20}whole reply",
            *(self._row(kind, count) for kind, count in sorted(self._counts().items())),
            *(f"broken: {reason}" for reason in self.reasons),
            *(f"not killed: no {kind} could be spared" for kind in self.spared),
        ]
        return "\n".join(lines)

    def _counts(self) -> Counter[str]:
        return Counter(fault.kind for fault in self.faults)

    def _row(self, kind: str, count: int) -> str:
        faults = [fault for fault in self.faults if fault.kind == kind]
        columns = (
            [fault.gap_s for fault in faults],
            [fault.first_s for fault in faults],
            [fault.return_s for fault in faults if fault.return_s],
            [fault.reply_s for fault in faults if fault.reply_s],
        )
        return f"{kind:<14}{count:>6}   " + "".join(f"{_spread(each):<20}" for each in columns)

    def _line(self, fault: Fault) -> str:
        seen = [f"{fault.at - self.began:8.1f} {fault.kind}: longest gap {fault.gap_s:.2f} s"]
        seen.append(f"first output {fault.first_s:.2f} s")
        if fault.return_s or fault.reply_s:
            seen.append(f"second try {fault.return_s:.2f} s, whole reply {fault.reply_s:.2f} s")
        return ", ".join(seen)

    def _cause(self, begin: float) -> Fault | None:
        """The first fault since `begin`, else the last one before."""
        found = None
        for fault in reversed(self.faults):
            if fault.at < begin:
                return found or fault
            found = fault
        return found


def _spread(seconds: Sequence[float]) -> str:
    """The median over the faults, the 95th percentile and the longest."""
    if not seconds:
        return "-"
    return " / ".join(f"{percentile(seconds, share):.1f}" for share in (0.5, 0.95, 1.0))
