"""Memory and processors within control groups."""

from pathlib import Path

import pytest

from runtime.host_limits import control_group_bytes, cpu_quotas, free_host_bytes, usable_cpus


@pytest.mark.parametrize(
    ("limits", "available"), [([], 1000), ([600], 600), ([800, 600, 10**20], 600), ([2000], 1000)]
)
def test_available_memory_is_that_of_the_machine_within_all_limits(monkeypatch, limits, available):
    monkeypatch.setattr("runtime.host_limits._machine_bytes", lambda: 1000)
    monkeypatch.setattr("runtime.host_limits.control_group_bytes", lambda: iter(limits))
    assert free_host_bytes() == available


@pytest.mark.parametrize(
    ("quotas", "usable"), [([], 4), ([3.9], 3), ([64, 2, 3], 2), ([0.2], 1), ([8], 4)]
)
def test_usable_processors_are_those_of_the_machine_within_all_quotas(monkeypatch, quotas, usable):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2, 3, 7})
    monkeypatch.setattr("runtime.host_limits.cpu_quotas", lambda: iter(quotas))
    assert usable_cpus() == usable


def written(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """The file systems of control groups and of a process."""
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "fs", tmp_path / "membership"


def control_groups(tmp_path: Path, membership: str, files: dict[str, str]) -> list[int]:
    return sorted(control_group_bytes(*written(tmp_path, membership, files)))


@pytest.mark.parametrize(
    ("membership", "files", "quotas"),
    [
        pytest.param(
            "0::/system.slice/caravan.service\n",
            {
                "system.slice/caravan.service/cpu.max": "400000 100000\n",
                "system.slice/cpu.max": "max 100000\n",
                "cpu.max": "150000 100000\n",
            },
            [4.0, 1.5],
            id="unified, at every level",
        ),
        pytest.param(
            "4:memory:/m\n3:cpu,cpuacct:/slurm/job\n0::/\n",
            {
                "cpu/slurm/job/cpu.cfs_quota_us": "-1\n",
                "cpu/slurm/job/cpu.cfs_period_us": "100000\n",
                "cpu/slurm/cpu.cfs_quota_us": "200000\n",
                "cpu/slurm/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/m/cpu.cfs_quota_us": "9\n",
            },
            [2.0],
            id="older",
        ),
        pytest.param(
            "0::/outer/unknown\n", {"cpu.max": "50000 100000"}, [0.5], id="in a container"
        ),
        pytest.param("0::/\n", {}, [], id="none"),
    ],
)
def test_quotas_of_processor_time_are_found(tmp_path, membership, files, quotas):
    assert [*cpu_quotas(*written(tmp_path, membership, files))] == quotas


def test_control_groups_of_the_unified_kind_limit_at_every_level(tmp_path):
    files = {
        "a/b/memory.max": "1000\n",
        "a/b/memory.current": "900\n",
        "a/b/memory.stat": "anon 600\nfile 300\ninactive_file 200\nactive_file 50\n",
        "a/memory.max": "5000",
        "a/memory.current": "4500",
    }
    assert control_groups(tmp_path, "0::/a/b\n", files) == [350, 500]


def test_control_groups_without_a_limit_do_not_limit(tmp_path):
    files = {"a/memory.max": "max\n", "a/memory.current": "900\n"}
    assert control_groups(tmp_path, "0::/a\n", files) == []
    assert list(control_group_bytes(tmp_path / "none", tmp_path / "nothing")) == []


def test_control_groups_of_the_older_kind_limit_too(tmp_path):
    files = {
        "memory/c/memory.limit_in_bytes": "2000",
        "memory/c/memory.usage_in_bytes": "1500",
        "memory/c/memory.stat": "total_inactive_file 100\ntotal_active_file 20\n",
    }
    membership = "12:cpu,cpuacct:/x\n7:memory:/c\n0::/\n"
    assert control_groups(tmp_path, membership, files) == [620]


def test_a_container_sees_its_own_limit_at_the_root(tmp_path):
    # Inside a container the membership may name a path that the mounted tree does not have.
    files = {"memory.max": "800", "memory.current": "300"}
    assert control_groups(tmp_path, "0::/outer/unknown\n", files) == [500]
