"""A few short rounds of `make soak`."""

from collections import Counter
from pathlib import Path

from tests.soak.rounds import play, soak_models


def test_rounds_hold_and_reach_what_they_are_for(tmp_path: Path) -> None:
    totals: Counter[str] = Counter()
    for number, soaked in enumerate(soak_models(tmp_path)):
        totals += play(soaked, number, requests=12)
    assert set(totals) >= {"aborted", "cached", "shifts", "images"}, totals
