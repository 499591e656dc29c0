"""The sections of bench/RESULTS.md."""

from bench.sections import GAPS, MODELS, RESULTS, ROUTING, with_section


def test_a_section_is_added_and_replaced_in_place():
    page = "# Results\n\nall\n"
    once = with_section(page, ROUTING, f"{ROUTING}\n\nfirst\n")
    assert once == f"# Results\n\nall\n\n{ROUTING}\n\nfirst\n"
    twice = with_section(once, ROUTING, f"{ROUTING}\n\nsecond\n")
    assert twice == f"# Results\n\nall\n\n{ROUTING}\n\nsecond\n"


def test_replacing_a_section_keeps_the_other_sections() -> None:
    page = f"{MODELS}\n\nmeasured\n"
    for heading, text in ((GAPS, "one"), (ROUTING, "two"), (GAPS, "three")):
        page = with_section(page, heading, f"{heading}\n\n{text}\n")
    page = with_section(page, MODELS, f"{MODELS}\n\nagain\n")
    others = f"\n{GAPS}\n\nthree\n\n{ROUTING}\n\ntwo\n"
    assert page == f"{MODELS}\n\nagain\n{others}"


def test_the_results_begin_with_what_make_bench_measures_first() -> None:
    assert RESULTS.read_text().startswith(f"{MODELS}\n")
