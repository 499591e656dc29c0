"""A few short rounds of `make soak`."""

from collections import Counter
from pathlib import Path

from tests.soak.rounds import play, soak_models

# With a client that stays while its context shifts: what happens does not depend on speed.
SEED = 28


def test_rounds_pass_and_include_aborts_cache_hits_shifts_and_images(tmp_path: Path) -> None:
    totals: Counter[str] = Counter()
    for number, soaked in enumerate(soak_models(tmp_path)):
        totals += play(soaked, SEED + number, requests=12, longest=120)
    assert set(totals) >= {"aborted", "cached", "shifts", "images"}, totals
