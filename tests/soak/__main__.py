"""`python -m tests.soak SECONDS SEED`: rounds of tests/soak/rounds.py until the time is over."""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.soak.growth import MIB, Held, check_growth, growth, held_now
from tests.soak.rounds import play, soak_models

# Rounds before memory is measured: the allocator has met every shape by then.
WARM_UP = 40
PROGRESS_S = 60.0


def main(seconds: float, seed: int) -> None:
    began = shown = time.monotonic()
    totals: Counter[str] = Counter()
    measured: list[Held] = []
    rounds = 0
    with tempfile.TemporaryDirectory() as folder:
        models = soak_models(Path(folder))
        while (now := time.monotonic()) < began + seconds:
            totals += play(models[rounds % len(models)], seed + rounds)
            rounds += 1
            if rounds > WARM_UP:
                measured.append(held_now())
            if measured and now > shown + PROGRESS_S:
                shown = now
                print(f"{now - began:.0f} s, {rounds} rounds: {_said(measured[-1])}", flush=True)
    counts = ", ".join(f"{name} {count:,}" for name, count in totals.items())
    print(f"{rounds} rounds from seed {seed}: {counts}")
    if len(measured) < 2:
        print(f"too few rounds to find a leak: it is searched for after round {WARM_UP}")
        return
    print(f"at the end: {_said(measured[-1])}; per round: {_said(growth(measured))}")
    check_growth(measured)


def _said(held: Held) -> str:
    resident = f"{held.resident_bytes / MIB:,.3f} MiB"
    return f"{resident}, {held.blocks:,.1f} blocks, {held.objects:,.1f} objects"


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
