"""The check of a server on a GPU, with a server on the CPU: make test-cuda."""

from pathlib import Path

from tests.unit.tools.test_gpu_check import assert_passes_without_a_device


def test_section_passes_without_a_device_and_gives_no_figures(tmp_path: Path) -> None:
    assert_passes_without_a_device("serving", tmp_path)
