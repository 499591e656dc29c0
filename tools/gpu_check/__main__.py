"""`python -m tools.gpu_check SECTION... --json OUT`: checks and measures the code for GPUs.

Run it in the tree, on a machine with a CUDA device, torch, triton, numpy, pillow, pytest and
transformers; the section `serving` also needs all that the server needs. `--wheels` is a folder
with gguf and other packages that are missing there (llguidance, sentencepiece), `--llama-cpp` one
with `llama-bench`, `llama-batched-bench` and their libraries, compiled for CUDA, without which
`peer` is skipped. A call takes at most ten minutes. OUT is written after each section; what their
processes find and print is written at once to a folder beside it. `--dry-run` computes tiny sizes
on a CPU and gives no figures.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tools.gpu_check.sections import SECTIONS, TOTAL_S, Call, run_sections
from tools.gpu_check.summary import summary
from tools.gpu_check.wheels import BESIDE, unpack


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--json", type=Path, required=True, help="the file for all results")
    parser.add_argument("--wheels", type=Path, help=f"a folder of wheels (default: {BESIDE.name})")
    parser.add_argument("--llama-cpp", type=Path, help="a folder of its programs, for `peer`")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, help="time limit of all sections together"
    )
    parser.add_argument("--dry-run", action="store_true")
    chosen = parser.parse_args(arguments)
    machine, found = _machine(), dict[str, dict[str, Any]]()
    results = chosen.json.with_suffix(".rows")
    shutil.rmtree(results, ignore_errors=True)  # of an earlier call
    results.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-wheels-") as place:
        folder = chosen.wheels or (BESIDE if BESIDE.is_dir() else None)
        paths = [] if folder is None else unpack(folder, Path(place))
        call = Call(results, chosen.dry_run, paths, chosen.llama_cpp, chosen.seconds)
        for name, result in run_sections(chosen.sections, call):
            found[name] = result
            everything = {"machine": machine, "dry_run": chosen.dry_run, "sections": found}
            chosen.json.write_text(json.dumps(everything, indent=1))
    print(summary(found, machine, str(chosen.json)))
    return 0 if all(result["state"] == "passed" for result in found.values()) else 1


def _machine() -> str:
    """Time and versions; the device is stated with each check and figure."""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "transformers"))
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return f"Python {platform.python_version()}, {versions}, {now}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    sys.exit(main())
