"""Peak memory of profiled code."""

from torch.profiler import profile


def peak_bytes(recorded: profile) -> int:
    """The largest number of bytes allocated at one time."""
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest
