"""Time from process start to the first token, and peak memory: this engine alone and llama.cpp.

`python -m bench.first_token MODULE:CLASS PATH THREADS CONTEXT_TOKENS SEQUENCES STEP_TOKENS` runs
once. The process imports the contender's module alone.
"""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple
from importlib import import_module
from pathlib import Path

from bench.contender import Contender, Setting, in_turns
from bench.report import Row
from runtime.garbage_collection import collector_paused

PROMPT = range(300, 332)
MIB = 2**20


def first_token_rows(
    label: str,
    path: Path,
    setting: Setting,
    rounds: int,
    ours: type[Contender],
    peer: type[Contender],
) -> list[Row]:
    """Rows of both engines, which are started in turn, each time in a new process."""
    print(f"{label}: start of this engine alone and of llama.cpp", flush=True)
    first, second = in_turns(lambda each: _started(each, path, setting), ours, peer, rounds)
    return [
        Row(label, "process start to first token", "s", _column(first, 0), _column(second, 0)),
        Row(label, "peak memory", "MiB", _column(first, 1), _column(second, 1)),
    ]


def _started(contender: type[Contender], path: Path, setting: Setting) -> tuple[float, float]:
    """The seconds to the first token, and the peak resident memory in MiB, mapped weights
    included."""
    name = f"{contender.__module__}:{contender.__qualname__}"
    arguments = [name, str(path), *map(str, astuple(setting))]
    begun = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", __spec__.name, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        peak = process.stdout.readline()
        seconds = time.perf_counter() - begun
    if process.returncode or not peak:
        raise SystemExit(f"{name} did not start; its own message is above.")
    return seconds, int(peak) / MIB


def _peak_bytes() -> int:
    """The peak resident memory of this process. `getrusage` begins with that of its parent."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _column(pairs: Sequence[tuple[float, float]], index: int) -> tuple[float, ...]:
    return tuple(pair[index] for pair in pairs)


def main(contender: str, path: str, *sizes: str) -> None:
    module, _, name = contender.partition(":")
    with collector_paused():  # as a replica does
        engine = getattr(import_module(module), name)(Path(path), Setting(*map(int, sizes)))
    engine.prefill(PROMPT)
    print(_peak_bytes(), flush=True)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
