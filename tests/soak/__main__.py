"""`python -m tests.soak SECONDS SEED`: rounds of tests/soak/rounds.py until the time is over."""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.soak.rounds import play, resident_bytes, soak_models

# Rounds before memory is compared: the allocator has met every shape by then.
WARM_UP = 40
MOST_GROWTH = 64 * 2**20


def main(seconds: float, seed: int) -> None:
    ends = time.monotonic() + seconds
    totals: Counter[str] = Counter()
    rounds, first = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        models = soak_models(Path(folder))
        while time.monotonic() < ends:
            totals += play(models[rounds % len(models)], seed + rounds)
            rounds += 1
            if rounds == WARM_UP:
                first = resident_bytes()
    counts = ", ".join(f"{name} {count:,}" for name, count in totals.items())
    print(f"{rounds} rounds from seed {seed}: {counts}")
    if first:
        growth = resident_bytes() - first
        print(f"memory grew by {growth / 2**20:.1f} MiB after round {WARM_UP}")
        assert growth <= MOST_GROWTH, "memory is leaked"


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
