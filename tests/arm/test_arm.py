"""Kernels of arm64, cross compiled and run under qemu-user: `make test-arm`."""

import shutil
from collections.abc import Iterator

import pytest
import torch

from runtime.kernels.auto_compute import FAST_TYPES
from runtime.kernels.cpu_levels import LEVELS, Level
from runtime.kernels.native import library
from tests.arm.emulated import COMPILER, EMULATOR, emulated
from tests.kernels.level_checks import check_kernels, integer_products


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "level", [level for level in LEVELS if level.machine == "aarch64"], ids=lambda level: level.name
)
def test_every_instruction_set_of_arm64_computes_the_same(
    level: Level, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which(COMPILER) or not shutil.which(EMULATOR):
        pytest.skip(f"{COMPILER} or {EMULATOR} is not installed")
    with emulated(level) as kernels:
        assert kernels.caravan_has_integers() == (level.name in FAST_TYPES)
        check_kernels(kernels, monkeypatch)
        here = library()
        if here is not None and here.caravan_has_integers() and kernels.caravan_has_integers():
            expected = integer_products(here, monkeypatch)
            computed = integer_products(kernels, monkeypatch)
            # AMX has no rounded BF16, and arm64 no integers of 16 bits.
            assert {name for name, *_ in expected.keys() ^ computed.keys()} <= {"BF16", "F16"}
            for name in expected.keys() & computed.keys():
                assert torch.equal(computed[name], expected[name]), name
