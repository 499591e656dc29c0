"""The sections of bench/RESULTS.md."""

import re

from bench.sections import (
    GAPS,
    HOST,
    RESULTS,
    ROUTING,
    SPECULATION,
    TEMPLATES,
    TURNS,
    kept_sections,
    section_of,
    with_section,
)


def test_a_section_is_added_and_replaced_in_place():
    page = "# Results\n\nall\n"
    once = with_section(page, ROUTING, f"{ROUTING}\n\nfirst\n")
    assert once == f"# Results\n\nall\n\n{ROUTING}\n\nfirst\n"
    twice = with_section(once, ROUTING, f"{ROUTING}\n\nsecond\n")
    assert twice == f"# Results\n\nall\n\n{ROUTING}\n\nsecond\n"
    assert page + section_of(twice, ROUTING) == twice
    assert section_of(page, ROUTING) == ""


def test_replacing_a_section_keeps_the_other_sections() -> None:
    page = "# Results\n\nmeasured\n"
    for heading, text in ((TEMPLATES, "one"), (ROUTING, "two"), (TEMPLATES, "three")):
        page = with_section(page, heading, f"{heading}\n\n{text}\n")
    assert section_of(page, TEMPLATES) == f"\n{TEMPLATES}\n\nthree\n"
    assert section_of(page, ROUTING) == f"\n{ROUTING}\n\ntwo\n"
    assert "# Results\n\nmeasured\n" + kept_sections(page) == page


def test_every_section_of_the_results_is_measured_or_kept_by_make_bench() -> None:
    page = RESULTS.read_text()
    lost = set(re.findall(r"\n(# .+)", page)) - set(re.findall(r"\n(# .+)", kept_sections(page)))
    assert lost <= {HOST, SPECULATION, GAPS, TURNS}
