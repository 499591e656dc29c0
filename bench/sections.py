"""Parts of bench/RESULTS.md that are measured apart: one is replaced, the others stay."""

TEMPLATES = "# Chat templates"
ROUTING = "# Routing, simulated"


def with_section(page: str, heading: str, section: str) -> str:
    """`section` begins with its heading; it takes the place of the one before, or comes last."""
    old = section_of(page, heading)
    new = f"\n{section.rstrip()}\n"
    return page.replace(old, new) if old else f"{page.rstrip()}\n{new}"


def section_of(page: str, heading: str) -> str:
    """From its heading to the next of its level, "" where there is none."""
    _, found, after = page.partition(f"\n{heading}\n")
    body, _, _ = after.partition("\n# ")
    return f"\n{heading}\n{body}" if found else ""


def kept_sections(page: str) -> str:
    """What a run of `make bench` does not measure."""
    return "".join(section_of(page, heading) for heading in (TEMPLATES, ROUTING))
