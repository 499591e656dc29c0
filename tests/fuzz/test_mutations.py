"""Mutated files, the same in each run, are refused in bounded time and memory."""

import resource
import time
import tracemalloc
from random import Random

import pytest

from tests.fuzz.mutations import mutated
from tests.fuzz.parsed_file import parse
from tests.fuzz.seeds import seed_files
from tests.fuzz.target import exercise

FILES = 240
SECONDS = 1.0
# Memory that libraries and the sandbox may use for any file, and for each byte of it.
BASE_BYTES, BYTES_PER_BYTE = 48 << 20, 64
RESIDENT_BYTES = 256 << 20


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> list[bytes]:
    return seed_files(tmp_path_factory.mktemp("seeds"))


def test_seeds_load_and_survive_parsing(seeds, tmp_path) -> None:
    path = tmp_path / "seed.gguf"
    path.write_bytes(seeds[0])
    exercise(path)  # warm-up: imports and caches
    for seed in seeds:
        path.write_bytes(seed)
        began = time.process_time()
        assert exercise(path) == "loaded"
        assert time.process_time() - began < SECONDS
        file = parse(seed)
        assert file is not None and file.bytes() == seed


def test_mutated_files_use_bounded_time_and_memory(seeds, tmp_path) -> None:
    """`exercise` catches only errors that refuse the file or the conversation."""
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
    assert min(outcomes.get(stage, 0) for stage in STAGES) > FILES // 120, outcomes


STAGES = ("refused by the reader", "refused by the registry", "refused by the template", "loaded")
