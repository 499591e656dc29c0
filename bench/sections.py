"""Parts of bench/RESULTS.md that are measured apart: one is replaced, the others stay."""

ROUTING = "# Routing, simulated"


def with_section(page: str, heading: str, section: str) -> str:
    """`section` begins with its heading; it takes the place of the one before, or comes last."""
    before, _, _ = page.partition(f"\n{heading}\n")
    return f"{before.rstrip()}\n\n{section}"


def section_of(page: str, heading: str) -> str:
    """From its heading on, "" where there is none."""
    _, found, after = page.partition(f"\n{heading}\n")
    return f"\n{heading}\n{after}" if found else ""
