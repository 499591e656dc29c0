"""`python -m tests.fuzz.sanitize SECONDS FILES FOLDER`: the CPU kernels under sanitizers.

Builds the kernels with `-fsanitize=address,undefined`, runs their tests, and then computes with
mutated files of every architecture and projector, for at most SECONDS and FILES. Findings are kept
in FOLDER/found, and the exit status is then 1.
"""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz import sanitized
from tests.fuzz.architectures import write_seeds

PROCESSES = 2
# A process is replaced after so many files, since it does not free all its memory.
FILES_OF_A_PROCESS = 200
KERNEL_TESTS = (
    *("-m", "pytest", "-q", "-p", "tests.fuzz.sanitized", "-p", "no:cacheprovider"),
    *("tests/kernels", "--ignore=tests/kernels/test_native.py"),
)
# Reads beyond the end of `x`: if the process survives, the sanitizers do not work.
_CANARY = """
import torch, tests.fuzz.sanitized
from runtime.kernels.native import library
x = torch.zeros(4096)
library().caravan_softcap(x.data_ptr(), 4096 + 16, 1.0, x.data_ptr(), 1)
"""


def main(seconds: float, files: int, folder: Path) -> int:
    for stale in (folder / "seeds", folder / "found", *folder.glob("work-*")):
        shutil.rmtree(stale, ignore_errors=True)
    (folder / "found").mkdir(parents=True)
    environment = sanitized.environment(sanitized.build(folder / "kernels"))
    _check_canary(environment)
    tested = subprocess.run([sys.executable, *KERNEL_TESTS], env=environment).returncode == 0
    print(f"sanitize: kernel tests: {'passed' if tested else 'FAILED'}", flush=True)
    seeds = write_seeds(folder / "seeds")
    print(f"sanitize: {len(seeds)} valid files", flush=True)
    search = Search(folder, environment, seconds, files)
    search.run()
    search.report()
    found = sorted(path.name for path in (folder / "found").iterdir())
    for name in found:
        print(f"sanitize: FOUND {folder / 'found' / name}")
    return 0 if tested and not found else 1


def _check_canary(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CANARY], env=environment, capture_output=True, text=True
    )
    if "heap-buffer-overflow" not in done.stderr:
        raise SystemExit(
            f"sanitize: the sanitizers do not detect a known overflow:\n{done.stderr[-2000:]}"
        )


class Search:
    """Processes that compute with mutated files; each is replaced when it ends or crashes."""

    def __init__(self, folder: Path, environment: dict[str, str], seconds: float, files: int):
        self._folder, self._environment, self._files = folder, environment, files
        self._deadline = time.monotonic() + seconds
        self._outcomes: dict[str, Counter[str]] = {}

    def run(self) -> None:
        batches = -(-self._files // FILES_OF_A_PROCESS)
        with ThreadPoolExecutor(PROCESSES) as pool:
            list(pool.map(self._batch, range(batches)))

    def report(self) -> None:
        total: Counter[str] = Counter()
        for name, outcomes in sorted(self._outcomes.items()):
            total += outcomes
            print(f"sanitize: {name}: {dict(outcomes)}")
        print(f"sanitize: {total.total()} files of {len(self._outcomes)} kinds: {dict(total)}")

    def _batch(self, number: int) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            return
        log = self._folder / f"log-{number}.txt"
        count = min(FILES_OF_A_PROCESS, self._files - number * FILES_OF_A_PROCESS)
        command = [sys.executable, "-m", "tests.fuzz.sanitized_target", str(self._folder)]
        with log.open("wb") as errors:
            done = subprocess.run(
                [*command, str(number), str(count), str(left_s)],
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        for line in done.stdout.splitlines():
            name, outcome = line.split("\t")
            self._outcomes.setdefault(name, Counter())[outcome] += 1
        if done.returncode:
            kept = self._folder / "found" / f"crash-{number}"
            os.rename(self._folder / f"work-{number}", kept)
            os.rename(log, kept / "error.txt")
        else:
            log.unlink()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
