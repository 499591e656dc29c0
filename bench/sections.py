"""Sections of bench/RESULTS.md, which are measured and replaced independently."""

from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")

MODELS = "# Benchmark results"
ROUTING = "# Routing, simulated"
REAL = "# A real file"
HOST = "# Host time of a step"
SPECULATION = "# Speculative decoding"
DRAFTS = "# Speculative decoding with a draft model"
TURNS = "# Second turns"
GAPS = "# Gaps of streams"


def publish(heading: str, section: str, *, write: bool) -> None:
    """Prints a section; `write` also puts it into bench/RESULTS.md."""
    print(section)
    if write:
        RESULTS.write_text(with_section(RESULTS.read_text(), heading, section))


def with_section(page: str, heading: str, section: str) -> str:
    """The page after replacing the section with the heading of `section`, or appending it."""
    new = f"{section.rstrip()}\n"
    before, found, old = f"\n{page}".partition(f"\n{heading}\n")
    if not found:
        return f"{page.rstrip()}\n\n{new}"
    _, following, after = old.partition("\n# ")
    return f"{before}\n{new}{following}{after}".removeprefix("\n")
