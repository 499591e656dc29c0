"""Which instruction sets processors have."""

from pathlib import Path

import pytest

from runtime.errors import ConfigurationError
from runtime.kernels import cpu_levels
from runtime.kernels.cpu_levels import levels_of, processor_features, usable_levels

# The flags of /proc/cpuinfo that matter here, in order of the processors' release.
HASWELL = "sse2 avx avx2 fma f16c bmi1 bmi2 abm movbe"
SKYLAKE_X = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
CASCADE_LAKE = f"{SKYLAKE_X} avx512_vnni"
ICE_LAKE = f"{CASCADE_LAKE} avx512vbmi avx512_vbmi2"
ZEN_4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 amx_tile"
ALDER_LAKE = f"{HASWELL} avx_vnni"


@pytest.mark.parametrize(
    ("machine", "features", "best"),
    [
        ("x86_64", "sse2", "x86-64"),
        ("x86_64", "sse2 avx avx2", "x86-64"),
        ("x86_64", HASWELL, "x86-64-v3"),
        ("x86_64", ALDER_LAKE, "x86-64-v3-vnni"),
        ("x86_64", SKYLAKE_X, "x86-64-v4"),
        ("x86_64", CASCADE_LAKE, "x86-64-v4-vnni"),
        ("x86_64", ICE_LAKE, "x86-64-v4-vnni"),
        ("x86_64", ZEN_4, "x86-64-v4-bf16"),
        ("x86_64", SAPPHIRE_RAPIDS, "x86-64-v4-amx"),
        ("aarch64", "fp asimd", "arm64"),
        ("aarch64", "fp asimd asimddp", "arm64-dotprod"),
        ("aarch64", "fp asimd asimddp sve i8mm bf16", "arm64-dotprod"),
        ("riscv64", "rv64gc", "generic"),
    ],
)
def test_the_best_level_needs_nothing_that_the_processor_lacks(
    machine: str, features: str, best: str
) -> None:
    assert levels_of(machine, features.split())[0].name == best


def test_features_are_read_from_linux_of_both_machines(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert processor_features(file) == {"fpu", "avx2"}
    file.write_text("processor\t: 0\nFeatures\t: fp asimddp\n")
    assert processor_features(file) == {"fp", "asimddp"}
    assert processor_features(tmp_path / "none") == frozenset()


def test_the_environment_forces_a_level_that_the_processor_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_levels, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_levels, "processor_features", lambda: frozenset(CASCADE_LAKE.split()))
    named = [level.name for level in usable_levels({"CARAVAN_KERNELS": "x86-64-v3"})]
    assert named == ["x86-64-v3"]
    with pytest.raises(
        ConfigurationError, match=r"`CARAVAN_KERNELS` is 'x86-64-v4-bf16'; .* has x86-64-v4-vnni, "
    ):
        usable_levels({"CARAVAN_KERNELS": "x86-64-v4-bf16"})


@pytest.mark.parametrize(
    ("permitted", "best"), [(True, "x86-64-v4-amx"), (False, "x86-64-v4-bf16")]
)
def test_amx_is_used_only_with_the_permission_of_the_kernel(
    permitted: bool, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_levels, "machine", lambda: "x86_64")
    monkeypatch.setattr(
        cpu_levels, "processor_features", lambda: frozenset(SAPPHIRE_RAPIDS.split())
    )
    monkeypatch.setattr(cpu_levels, "_amx_is_permitted", lambda: permitted)
    assert usable_levels({})[0].name == best
