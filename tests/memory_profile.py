"""How much memory a profiled piece of code held at once."""

from torch.profiler import profile


def peak_bytes(recorded: profile) -> int:
    """The most bytes that were allocated at once."""
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest
