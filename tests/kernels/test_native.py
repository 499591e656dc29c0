"""Building the CPU kernels: the cache, wheels, a missing compiler, every instruction set."""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from runtime.kernels import build, cpu_levels, native, openmp
from runtime.kernels.auto_compute import FAST_TYPES
from runtime.kernels.build import NativeUnavailableError
from runtime.kernels.matmul import matmul, matmul_twin
from runtime.quant.block_types import BLOCK_TYPES
from tests.kernels.level_checks import check_kernels, integer_products
from tests.kernels.native_kernels import need_compiler
from tests.kernels.random_weights import random_weight


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nor kernels of an earlier build."""
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_without_a_compiler_the_twin_is_used_after_one_warning_with_the_reason(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = torch.randn(3, 64), random_weight(BLOCK_TYPES[8], 5, 64)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(matmul(x, weight), matmul_twin(x, weight))
        matmul(x, weight)
    [record] = caplog.records
    assert "no C compiler" in record.getMessage()


def test_a_failing_compiler_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho no such flag >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(NativeUnavailableError, match=r"broken-cc.*no such flag"):
        build.built_library(directory=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_the_environment_sets_the_cache_directory() -> None:
    assert build.cache_directory({"CARAVAN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert build.cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/caravan")
    assert build.cache_directory({}).parts[-2:] == (".cache", "caravan")


def test_a_second_build_compiles_nothing(one_source: Path, tmp_path: Path) -> None:
    first = build.built_library(directory=tmp_path)
    built = first.stat().st_ino
    assert build.built_library(directory=tmp_path) == first
    assert first.stat().st_ino == built
    one_source.write_text("int one(void) { return 2; }\n")
    assert build.built_library(directory=tmp_path) != first
    assert not list(tmp_path.glob("build-*"))


def keep_nothing(library: Path) -> None:
    library.write_bytes(b"")


def cut(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def keep_size_only(library: Path) -> None:
    library.write_bytes(bytes(library.stat().st_size))


@pytest.mark.parametrize("damage", [keep_nothing, cut, keep_size_only])
def test_a_damaged_library_is_not_loaded_but_compiled_again(
    one_source: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """As after a loss of power. The dynamic linker may end the process."""
    built = build.built_library()
    content = built.read_bytes()
    damage(built)
    assert native.needs_compiling()
    assert build.built_library().read_bytes() == content and not native.needs_compiling()


def test_a_library_is_on_the_disk_before_it_has_its_name(
    one_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, int]] = []

    def fsync(file: int) -> None:
        steps.append(("written", os.fstat(file).st_ino))

    def replace(source: Path, target: Path) -> None:
        steps.append(("named", source.stat().st_ino))
        source.rename(target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    inode = build.built_library().stat().st_ino
    assert steps == [("written", inode), ("named", inode)]


def test_a_folder_of_a_killed_compilation_is_removed_by_a_later_one(
    one_source: Path, tmp_path: Path
) -> None:
    """Not that of one which may still run."""
    left, running = tmp_path / "build-left", tmp_path / "build-running"
    for folder in (left, running):
        folder.mkdir()
        (folder / "one.o").write_bytes(b"")
    long_ago = time.time() - 2 * build._COMPILE_TIMEOUT_S - 60
    os.utime(left, (long_ago, long_ago))
    build.built_library(directory=tmp_path)
    assert [*tmp_path.glob("build-*")] == [running]


def test_libraries_that_were_not_loaded_for_long_are_removed_by_a_later_compilation(
    one_source: Path, tmp_path: Path
) -> None:
    """Not those that a process has loaded, nor those of another installation that is in use."""
    built = {}
    for number, name in enumerate(("unused", "loaded", "used")):
        one_source.write_text(f"int one(void) {{ return {number}; }}\n")
        built[name] = build.built_library(directory=tmp_path)
    for library in built.values():
        os.utime(library, (time.time() - build.UNUSED_AGE_S - 60,) * 2)
    assert build.built_library(directory=tmp_path) == built["used"]
    one_source.write_text("int one(void) { return 3; }\n")
    with built["loaded"].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        new = build.built_library(directory=tmp_path)
    assert {*tmp_path.glob("*.so")} == {new, built["loaded"], built["used"]}


def test_loaded_kernels_are_locked() -> None:
    """The processes of other hosts may remove them from a network file system."""
    if native.library() is None:
        pytest.skip("no native kernels here")
    with build.built_library().open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def make_unwritable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a read-only file system does, also for root."""
    create = build.tempfile.TemporaryFile

    def refuse(*, dir: Path) -> IO[bytes]:
        if dir == folder:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return create(dir=dir)

    monkeypatch.setattr(build.tempfile, "TemporaryFile", refuse)


def test_kernels_in_a_read_only_cache_are_used(
    one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build.built_library()
    make_unwritable(tmp_path / "cache", monkeypatch)
    assert built.parent == tmp_path / "cache"
    assert build.built_library() == built and not native.needs_compiling()
    assert not list((tmp_path / "temporary").iterdir())


def test_without_a_cache_kernels_are_compiled_once_into_a_folder_of_this_user(
    one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("not a directory")
    assert native.needs_compiling()
    built = build.built_library()
    (folder,) = (tmp_path / "temporary").iterdir()
    assert built.parent == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.built_library() == built and not native.needs_compiling()
    cached = tmp_path / "cache" / built.name
    cached.parent.unlink()
    cached.parent.mkdir()
    cached.write_bytes(built.read_bytes())
    assert build.built_library() == cached


def mount_noexec(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """As a mount option does for these folders."""
    real = os.statvfs

    def statvfs(folder: Path) -> SimpleNamespace:
        within = any(Path(folder).is_relative_to(each) for each in folders)
        return SimpleNamespace(f_flag=real(folder).f_flag | os.ST_NOEXEC * within)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_kernels_in_a_cache_that_is_mounted_noexec_are_not_loaded_but_compiled_elsewhere(
    one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.built_library()
    mount_noexec(monkeypatch, tmp_path / "cache")
    assert native.needs_compiling()
    built = build.built_library()
    assert tmp_path / "temporary" in built.parents and not native.needs_compiling()
    mount_noexec(monkeypatch, tmp_path)
    with pytest.raises(NativeUnavailableError, match=r"cache is mounted noexec; set CARAVAN_CACHE"):
        build.built_library()


@pytest.mark.parametrize("change", ["mode", "owner", "link"])
def test_a_temporary_folder_that_others_may_write_is_not_used(
    one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Nor are libraries in it loaded."""
    (tmp_path / "cache").write_text("not a directory")
    folder = build.built_library().parent
    match change:
        case "mode":
            folder.chmod(0o770)
        case "owner":
            own = folder.with_name(f"caravan-kernels-{os.geteuid() + 1}")
            folder.rename(own)
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        case "link":
            folder.rename(tmp_path / "elsewhere")
            folder.symlink_to(tmp_path / "elsewhere")
    assert native.needs_compiling()
    with pytest.raises(NativeUnavailableError, match="cannot be written by this user, or by other"):
        build.built_library()


def compilers_without_space(folder: Path, *full: Path) -> Iterator[Path]:
    """Two compilers, for which these folders are on a full disk; each notes its calls in `calls`
    beside it."""
    for name in ("one", "two"):
        path = folder / name
        path.write_text(
            "#!/bin/sh\n"
            f'echo {name} "$TMPDIR" >> {folder}/calls\n'
            f'case "$TMPDIR" in {"|".join(f"{each}/*" for each in full)})\n'
            "  echo 'error: No space left on device' >&2; exit 1\n"
            'esac\nexec cc "$@"\n'
        )
        path.chmod(0o755)
        yield path


@pytest.mark.parametrize("temporary_is_full", [False, True])
def test_on_a_full_disk_the_temporary_folder_is_tried_once_with_the_same_compiler(
    one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary_is_full: bool
) -> None:
    full = (tmp_path / "cache", *[tmp_path / "temporary"] * temporary_is_full)
    compilers = [*map(str, compilers_without_space(tmp_path, *full))]
    monkeypatch.setattr(build, "_COMPILERS", compilers)
    monkeypatch.delenv("CC", raising=False)
    if temporary_is_full:
        with pytest.raises(NativeUnavailableError, match=r"No space.*/cache\); .*/temporary/"):
            build.built_library()
    else:
        assert tmp_path / "temporary" in build.built_library().parents
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert {name for name, _ in calls} == {"one"}
    assert sum(folder.startswith(f"{tmp_path}/cache/") for _, folder in calls) == 1


def test_a_wheel_brings_the_levels_it_was_built_for(
    one_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = cpu_levels.usable_levels({})
    wanted = {build.WANTED: usable[-1].name}
    [built] = build.prebuild(build.PREBUILT, wanted)
    assert native.needs_compiling()  # the best level, as there is a compiler
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert native.library() == built and not native.needs_compiling()
    assert build.prebuild(build.PREBUILT, wanted) == [] and not build.PREBUILT.exists()


def test_a_wheel_for_unknown_levels_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has avx9; there are .*x86-64-v3.* or all"):
        build.prebuild(tmp_path, {build.WANTED: "x86-64-v3 avx9"})


def test_compilation_and_its_time_are_logged_once(
    one_source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert native.needs_compiling()
    with caplog.at_level(logging.INFO):
        native.main()
    assert not native.needs_compiling()
    before, after = (record.getMessage() for record in caplog.records)
    assert before.startswith("Compiling the CPU kernels for ") and after.endswith(" s.")
    native.library.cache_clear()
    assert not native.needs_compiling()
    native.main()
    assert len(caplog.records) == 2


def test_compiling_ahead_without_a_compiler_logs_the_reason(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert not native.needs_compiling()
    native.main()
    [record] = caplog.records
    assert "no C compiler" in record.getMessage()


def kernels_of(level: cpu_levels.Level) -> ctypes.CDLL:
    """The best level is that of the product, which is in the cache. Others are compiled with few
    optimisations, in a third of the time."""
    need_compiler()
    best = level == cpu_levels.usable_levels({})[0]
    flags = tuple("-Og" if flag == "-O3" and not best else flag for flag in build.FLAGS)
    return native.load(build.built_library(flags=flags, level=level))


@pytest.mark.parametrize("level", cpu_levels.usable_levels({}), ids=lambda level: level.name)
def test_every_instruction_set_of_this_processor_computes_the_same(
    level: cpu_levels.Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = kernels_of(level)
    assert narrow.caravan_level().decode() == level.name
    assert narrow.caravan_has_integers() == (level.name in FAST_TYPES)
    check_kernels(narrow, monkeypatch)


def test_integer_products_have_the_same_bits_with_every_instruction_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usable = map(kernels_of, cpu_levels.usable_levels({}))
    first: dict[tuple[str, str, int], torch.Tensor] = {}
    for kernels in usable:
        if not kernels.caravan_has_integers():
            continue
        for name, products in integer_products(kernels, monkeypatch).items():
            assert torch.equal(products, first.setdefault(name, products)), name


def test_clang_compiles_kernels_that_run_with_the_openmp_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not (clang := shutil.which("clang")):
        pytest.skip("clang is not installed")
    monkeypatch.setenv("CC", clang)
    level, flags = cpu_levels.usable_levels({})[-1], ("-O1", *build.FLAGS[1:])
    check_kernels(
        native.load(build.built_library(flags=flags, directory=tmp_path, level=level)), monkeypatch
    )


def test_mapped_files_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"mod\xe8le.gguf")
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert str(path) in openmp._mapped()


def test_no_source_needs_the_openmp_of_a_compiler() -> None:
    """Its pragmas would be ignored, as `FLAGS` has no -fopenmp."""
    assert "-fopenmp" not in build.FLAGS
    for source in build._SOURCES.glob("*.[ch]"):
        assert "#pragma omp" not in source.read_text(), source.name


def test_the_kernels_use_the_threads_that_torch_has_already_started() -> None:
    need_compiler()
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux tells how many threads run")
    code = """
import torch
from runtime.kernels.matmul import matmul
from runtime.kernels.native import library
from runtime.quant.block_types import block_type
from runtime.quant.weight import Weight

def threads():
    return open("/proc/self/status").read().split("Threads:")[1].split()[0]

torch.set_num_threads(3)
assert library() is not None
x = torch.randn(2000, 2000)
(x @ x), x.sin()
before = threads()
matmul(x, Weight(x.view(torch.uint8), block_type("F32"), (2000, 2000)))
lines = open("/proc/self/maps").read().splitlines()
runtimes = {line.split()[-1] for line in lines if "omp" in line.rsplit("/", 1)[-1]}
print(before, threads(), len(runtimes))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, runtimes = map(int, done.stdout.split())
    assert before >= 3 and after == before and runtimes == 1
