"""Two thousand damaged files, the same on each run: refused by name, soon, in little memory."""

import resource
import time
import tracemalloc
from random import Random

import pytest

from tests.fuzz.mutations import mutated
from tests.fuzz.pieces import take_apart
from tests.fuzz.seeds import seed_files
from tests.fuzz.target import exercise

FILES = 2000
SECONDS = 1.0
# What the libraries and the sandbox may take whatever the file, and what each byte may cost.
BASE_BYTES, BYTES_PER_BYTE = 48 << 20, 64
RESIDENT_BYTES = 256 << 20


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> list[bytes]:
    return seed_files(tmp_path_factory.mktemp("seeds"))


def test_the_seeds_load_and_come_together_again(seeds, tmp_path) -> None:
    path = tmp_path / "seed.gguf"
    path.write_bytes(seeds[0])
    exercise(path)  # what is slow only the first time
    for seed in seeds:
        path.write_bytes(seed)
        began = time.process_time()
        assert exercise(path) == "loaded"
        assert time.process_time() - began < SECONDS
        pieces = take_apart(seed)
        assert pieces is not None and pieces.bytes() == seed


def test_damaged_files_are_refused_soon_and_with_little_memory(seeds, tmp_path) -> None:
    """`exercise` lets no error through but those that name the file or refuse the conversation."""
    random, path = Random(20260), tmp_path / "damaged.gguf"
    outcomes: dict[str, int] = {}
    path.write_bytes(seeds[0])
    exercise(path)
    resident_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for index in range(FILES):
        data = mutated(random.choice(seeds), random)
        path.write_bytes(data)
        if traced := index % 4 == 0:
            tracemalloc.start()
        began = time.process_time()
        try:
            outcome = exercise(path)
        except BaseException as error:
            error.add_note(f"file {index} of {FILES}")
            raise
        took = time.process_time() - began
        if traced:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < BASE_BYTES + BYTES_PER_BYTE * len(data), index
        assert took < SECONDS * (3 if traced else 1), index  # tracing slows everything
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert resident - resident_before < RESIDENT_BYTES
    assert min(outcomes.get(stage, 0) for stage in STAGES) > FILES // 200, outcomes


STAGES = ("refused by the reader", "refused by the registry", "refused by the template", "loaded")
