"""Launches that are remembered are those that Triton would make."""

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

NAME, WARPS, ATTRIBUTES, GRID, ARGUMENTS = range(5)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.cuda.recording_driver` prints, without the interpreter of the other tests."""
    cache = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": os.fspath(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.recording_driver"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_remembered_launch_is_that_of_triton(recorded: dict[str, Any]) -> None:
    assert recorded["by_triton"] == len(recorded["launches"])
    for first, *others in recorded["launches"]:
        assert others == [first, first]
        assert first[NAME] == "scale_kernel"
        assert first[GRID] == [2, 1, 1]
        assert first[ARGUMENTS][:2] == ["torch.float32"] * 2


def test_what_changes_the_code_is_compiled_anew(recorded: dict[str, Any]) -> None:
    usual, divisible, moved, larger, wider = (each[0] for each in recorded["launches"])
    assert [each[ARGUMENTS][2] for each in (usual, divisible, moved)] == [33, 48, 33]
    assert usual[ATTRIBUTES] != divisible[ATTRIBUTES]  # of the count
    assert usual[ATTRIBUTES] != moved[ATTRIBUTES]  # of addresses
    assert [usual[ARGUMENTS][-2], larger[ARGUMENTS][-2]] == [32, 64]
    assert [usual[WARPS], wider[WARPS]] == [1, 2]


def test_arguments_that_triton_distinguishes_are_distinguished(recorded: dict[str, Any]) -> None:
    kinds = recorded["kinds"]
    assert len({theirs for _, theirs in kinds.values()}) == 14
    for (a, (our_a, their_a)), (b, (our_b, their_b)) in combinations(kinds.items(), 2):
        assert our_a != our_b or their_a == their_b, f"{a} and {b}"
