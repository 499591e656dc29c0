"""`python -m tests.fuzz SECONDS RUNS FOLDER`: coverage-guided search for harmful model files.

Needs atheris. Keeps files in FOLDER that raise unexpected errors, take more than a second of
processor time, or exceed the memory limit.
"""

import sys
import time
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["model_zoo"]):
    from tests.fuzz.target import exercise

from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import seed_files

MAX_BYTES = 1 << 16
MAX_MEGABYTES = 1500
MAX_SECONDS = 1.0


def main(seconds: int, runs: int, folder: Path) -> None:
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seed_files(folder)):
        (corpus / f"seed-{number}").write_bytes(seed)
    for made in folder.glob("*.gguf"):
        made.unlink()
    path = folder / "current.gguf"

    def check(data: bytes) -> None:
        if not data:
            return
        path.write_bytes(data)
        began = time.process_time()
        exercise(path)
        took = time.process_time() - began
        assert took < MAX_SECONDS, f"{took:.1f} s of processor time"

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return atheris.Mutate(data, max_size)
        return mutated(data, random)[:max_size]

    options = [
        f"-max_total_time={seconds}",
        f"-runs={runs}",
        f"-max_len={MAX_BYTES}",
        f"-rss_limit_mb={MAX_MEGABYTES}",
        "-timeout=30",
        "-print_final_stats=1",
        f"-artifact_prefix={folder}/",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
