"""Copies of weights in tiles: their content, their one writer, and when there is none."""

import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from model_zoo.gguf import tiled_copy
from model_zoo.gguf.mapped import MappedTensors
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.tiled_copy import UNUSED_AGE_S, TilingOptions, Written
from runtime.quant.block_types import BlockType
from tests.checkout import ROOT
from tests.gguf_files import write_tensors
from tests.patience import wait_until
from tests.tiles import in_tiles, tiled_type

RANDOM = np.random.default_rng(0)


def matrix(*shape: int, type: str = "Q8_0") -> tuple[np.ndarray, str]:
    return RANDOM.standard_normal(shape, dtype=np.float32), type


def write(path: Path, **tensors: tuple[np.ndarray, str]) -> GGUFFile:
    write_tensors(path, {f"{name.replace('__', '.')}.weight": t for name, t in tensors.items()})
    return GGUFFile.open(path)


def tiled_tensors(
    file: GGUFFile, options: TilingOptions, written: Written = lambda name, nbytes: None
) -> MappedTensors | None:
    """All types have their tiles, whatever this processor multiplies."""
    return tiled_copy.tiled_tensors(file, options, tiled_type, written)


@pytest.fixture
def options(tmp_path) -> TilingOptions:
    return TilingOptions(tmp_path / "cache" / "tiles", least_bytes=1, spare_bytes=0)


def copies(options: TilingOptions) -> list[Path]:
    return sorted(options.directory.glob("*.tiles"))


def names(options: TilingOptions) -> list[str]:
    return sorted(path.suffix or path.name for path in options.directory.iterdir())


def test_a_copy_has_the_tiles_of_each_matrix(tmp_path, options) -> None:
    file = write(
        tmp_path / "a.gguf", up=matrix(32, 64), norms=matrix(16, 8192, type="F32"),
        down=matrix(48, 32, type="Q4_0"), experts=matrix(3, 16, 32, type="MXFP4"),
        gate=matrix(48, 96, type="F16"), more=matrix(2, 16, 64, type="BF16"),
    )  # fmt: skip
    tiled = tiled_tensors(file, options)
    assert tiled is not None
    names = ("up", "down", "experts", "gate", "more")
    assert set(tiled.tensors) == {f"{name}.weight" for name in names}
    for name in tiled.tensors:
        found, rows = tiled.weight(name), file.weight(name)
        expected = in_tiles(rows)
        assert (found.type, found.shape) == (expected.type, rows.shape)
        assert torch.equal(found.data, expected.data)
        assert sum(tiled.fetch(name)) == expected.nbytes
    (copy,) = copies(options)
    assert copy.stat().st_size == sum(in_tiles(file.weight(n)).nbytes for n in tiled.tensors)


def none_of_f16(type: BlockType) -> BlockType | None:
    return None if type.name == "F16" else tiled_type(type)


def test_processors_that_multiply_other_tiles_have_other_copies(tmp_path, options) -> None:
    file = write(tmp_path / "a.gguf", up=matrix(32, 64), gate=matrix(32, 64, type="F16"))
    assert tiled_tensors(file, options) is not None
    less = tiled_copy.tiled_tensors(file, options, none_of_f16)
    assert less is not None and set(less.tensors) == {"up.weight"}
    assert len(copies(options)) == 2
    assert tiled_copy.tiled_tensors(file, options, lambda type: None) is None


def test_adjacent_and_evenly_spaced_tensors_are_views(tmp_path, options) -> None:
    file = write(tmp_path / "a.gguf", q=matrix(32, 64), k=matrix(16, 64), v=matrix(16, 64))
    tiled = tiled_tensors(file, options)
    assert tiled is not None
    every = [f"{name}.weight" for name in "qkv"]
    for found, rows in (
        (tiled.adjacent_rows(every), file.adjacent_rows(every)),
        (tiled.evenly_spaced(every[1:]), file.evenly_spaced(every[1:])),
    ):
        assert found is not None and rows is not None and found.shape == rows.shape
        assert torch.equal(found.data, in_tiles(rows).data)
    assert tiled.adjacent_rows([every[0], every[2]]) is None


def test_only_multiplied_matrices_of_whole_tiles_are_copied(tmp_path, options) -> None:
    shared = {
        "token_embd": matrix(32, 32), "per_layer_token_embd": matrix(32, 32),
        "some_rows": matrix(24, 32), "numbers": matrix(32, 32, type="F32"),
        "part_of_a_block": matrix(32, 48, type="F16"),
        "kernel": matrix(2, 2, 16, 32), "vector": matrix(32), "q": matrix(16, 32),
    }  # fmt: skip
    tied = tiled_tensors(write(tmp_path / "tied.gguf", **shared), options)
    assert tied is not None and set(tied.tensors) == {"token_embd.weight", "q.weight"}
    apart = write(tmp_path / "apart.gguf", **shared, output=matrix(32, 32))
    tiled = tiled_tensors(apart, options)
    assert tiled is not None and set(tiled.tensors) == {"output.weight", "q.weight"}


def test_small_models_get_no_copy(tmp_path, options) -> None:
    file = write(tmp_path / "a.gguf", up=matrix(32, 64))
    assert tiled_tensors(file, TilingOptions(options.directory)) is None
    assert not options.directory.exists()


def test_each_part_of_a_split_model_gets_a_copy(tmp_path, options) -> None:
    first = tmp_path / "a-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(first, "llama", split_max_tensors=1)
    for name in ("up", "down"):
        numbers, stored = matrix(32, 64)[0], gguf.GGMLQuantizationType.Q8_0
        data = gguf.quants.quantize(numbers, stored)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=stored)
    writer.path = tmp_path / "a.gguf"
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(first)
    tiled = tiled_tensors(file, options)
    assert tiled is not None and len(copies(options)) == 2
    for name in ("up.weight", "down.weight"):
        assert torch.equal(tiled.weight(name).data, in_tiles(file.weight(name)).data)


def test_a_copy_is_written_once(tmp_path, options) -> None:
    path = tmp_path / "a.gguf"
    file, written = write(path, up=matrix(32, 64), down=matrix(16, 64)), []
    first = tiled_tensors(file, options, lambda *part: written.append(part))
    assert written == [("up.weight", 32 * 68), ("down.weight", 16 * 68)]
    assert names(options) == [".json", ".tiles", "lock"]
    before = copies(options)[0].stat()
    os.link(path, tmp_path / "link.gguf")
    again = tiled_tensors(
        GGUFFile.open(tmp_path / "link.gguf"), options, lambda *part: written.append(part)
    )
    assert first is not None and again is not None and len(written) == 2
    after = copies(options)[0].stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert torch.equal(again.weight("up.weight").data, first.weight("up.weight").data)


# Opens the copy of a file, and prints how many parts of tensors it has written.
OPEN = """
import logging, os, resource, signal, sys
from pathlib import Path
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.tiled_copy import TilingOptions, tiled_tensors
from tests.tiles import tiled_type

logging.basicConfig(level=logging.INFO)
written, (path, directory, mode) = [], sys.argv[1:]
def count(*part):
    written.append(part)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
file = GGUFFile.open(path)
if mode == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
tiled = tiled_tensors(file, TilingOptions(Path(directory), 1, 0), tiled_type, count)
print(len(written), tiled is not None)
"""


@pytest.fixture
def opening(options) -> Callable[..., subprocess.Popen[str]]:
    def start(path: Path, mode: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", OPEN, str(path), str(options.directory), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    return start


def test_of_two_processes_one_writes_and_the_other_waits(
    tmp_path, options, opening, caplog
) -> None:
    """This process is one of them."""
    caplog.set_level(logging.INFO, "model_zoo")
    path, written = tmp_path / "a.gguf", []
    file = write(path, up=matrix(32, 64))
    options.directory.mkdir(parents=True)
    with ThreadPoolExecutor() as thread:
        with (options.directory / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = opening(path)
            tiled = thread.submit(tiled_tensors, file, options, lambda *part: written.append(part))
            assert "Waiting for another process" in process.stderr.readline()
            wait_until(lambda: "Waiting for another process" in caplog.text)
            assert not copies(options)
        found = tiled.result()
    own = f"{len(written)} {found is not None}"
    assert sorted([process.communicate()[0].strip(), own]) == ["0 True", "1 True"]
    assert names(options) == [".json", ".tiles", "lock"]


def test_a_killed_writer_leaves_no_copy_and_is_replaced(tmp_path, options, opening) -> None:
    path = tmp_path / "a.gguf"
    file = write(path, up=matrix(32, 64))
    opening(path, "killed").communicate()
    assert names(options) == [".unfinished", "lock"]
    tiled = tiled_tensors(file, options)
    assert tiled is not None
    assert torch.equal(tiled.weight("up.weight").data, in_tiles(file.weight("up.weight")).data)
    assert names(options) == [".json", ".tiles", "lock"]


def test_a_disk_that_becomes_full_leaves_nothing(tmp_path, options, opening) -> None:
    path = tmp_path / "a.gguf"
    write(path, up=matrix(256, 64))
    output, log = opening(path, "full").communicate()
    assert output.strip() == "0 False"
    assert "Weights are not rearranged" in log and "File too large" in log
    assert names(options) == ["lock"]


def test_without_the_space_the_rows_of_the_file_are_used(tmp_path, options, caplog) -> None:
    file = write(tmp_path / "a.gguf", up=matrix(32, 64))
    little = TilingOptions(options.directory, least_bytes=1, spare_bytes=1 << 62)
    assert tiled_tensors(file, little) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING, "`caravan serve` shows it"
    assert "2,176 bytes are needed" in record.message and "are free" in record.message
    assert names(options) == ["lock"]


def test_without_a_cache_directory_the_rows_of_the_file_are_used(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    options = TilingOptions(tmp_path / "file" / "tiles", least_bytes=1, spare_bytes=0)
    assert tiled_tensors(write(tmp_path / "a.gguf", up=matrix(32, 64)), options) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING, "`caravan serve` shows it"
    assert "Weights are not rearranged" in record.message


def test_copies_of_changed_and_lost_files_are_removed(tmp_path, options) -> None:
    paths = {name: tmp_path / f"{name}.gguf" for name in ("changed", "lost", "kept")}
    for path in paths.values():
        assert tiled_tensors(write(path, up=matrix(32, 64)), options) is not None
    before = copies(options)
    (options.directory / "other").write_text("")
    paths["lost"].unlink()
    changed = write(paths["changed"], up=matrix(48, 64))
    tiled = tiled_tensors(changed, options)
    assert tiled is not None
    assert torch.equal(tiled.weight("up.weight").data, in_tiles(changed.weight("up.weight")).data)
    after = copies(options)
    assert len(after) == 2 and len(set(before) & set(after)) == 1
    assert names(options) == [".json", ".json", ".tiles", ".tiles", "lock", "other"]


def on_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=name))


def test_a_copy_is_found_after_the_file_system_was_mounted_again(tmp_path, options) -> None:
    """A network file system then has another device number."""
    path, written = tmp_path / "a.gguf", []
    assert tiled_tensors(write(path, up=matrix(32, 64)), options) is not None
    file = GGUFFile.open(path)
    (part,) = file.parts
    part.identity = (part.identity[0] + 1, *part.identity[1:])
    assert tiled_tensors(file, options, lambda *each: written.append(each)) is not None
    assert not written


def test_files_of_equal_inode_size_and_time_on_other_devices_share_no_copy(
    tmp_path, options
) -> None:
    one, other = (write(tmp_path / f"{name}.gguf", up=matrix(32, 64)) for name in ("one", "other"))
    assert tiled_tensors(one, options) is not None
    other.parts[0].identity = one.parts[0].identity
    assert tiled_tensors(other, options) is None, "its own copy is missing and is not written"


def test_copies_of_other_hosts_are_removed_only_after_some_time_without_use(
    tmp_path, options, monkeypatch
) -> None:
    on_host(monkeypatch, "far")
    for name in ("used", "unused"):
        assert tiled_tensors(write(tmp_path / f"{name}.gguf", up=matrix(32, 64)), options)
    for name in ("used", "unused"):
        (tmp_path / f"{name}.gguf").rename(tmp_path / f"{name}.there")
    on_host(monkeypatch, "here")
    assert tiled_tensors(write(tmp_path / "a.gguf", up=matrix(32, 64)), options) is not None
    assert len(copies(options)) == 3
    long_ago = time.time() - UNUSED_AGE_S - 60
    for description in options.directory.glob("*.json"):
        os.utime(description, (long_ago, long_ago))
    on_host(monkeypatch, "far")
    assert tiled_tensors(GGUFFile.open(tmp_path / "used.there"), options) is not None
    on_host(monkeypatch, "here")
    assert tiled_tensors(write(tmp_path / "b.gguf", up=matrix(32, 64)), options) is not None
    assert len(copies(options)) == 3, "of a, b and the used file"
    for name in ("a.gguf", "used.there"):
        file, written = GGUFFile.open(tmp_path / name), []
        assert tiled_tensors(file, options, lambda *part, to=written: to.append(part)) is not None
        assert not written


def test_a_copy_that_is_unused_since_its_file_has_a_newer_one_is_removed(tmp_path, options) -> None:
    """As after an update that rearranges in another way, and not beside it."""
    file = write(tmp_path / "a.gguf", up=matrix(32, 64), gate=matrix(32, 64, type="F16"))
    assert tiled_tensors(file, options) is not None
    (old,) = options.directory.glob("*.json")
    long_ago = (time.time() - UNUSED_AGE_S - 60,) * 2
    os.utime(old, long_ago)
    assert tiled_tensors(write(tmp_path / "b.gguf", up=matrix(32, 64)), options) is not None
    assert old.exists(), "the only copy of its file"
    assert tiled_tensors(file, options) is not None
    assert tiled_copy.tiled_tensors(file, options, none_of_f16) is not None
    assert old.exists(), "used beside the newer one"
    os.utime(old, long_ago)
    assert tiled_tensors(write(tmp_path / "c.gguf", up=matrix(32, 64)), options) is not None
    assert not old.exists() and len(copies(options)) == 3


def test_a_description_that_a_full_disk_has_cut_keeps_its_copy_for_some_time(
    tmp_path, options
) -> None:
    assert tiled_tensors(write(tmp_path / "a.gguf", up=matrix(32, 64)), options) is not None
    (description,) = options.directory.glob("*.json")
    description.write_text("")
    assert tiled_tensors(write(tmp_path / "b.gguf", up=matrix(32, 64)), options) is not None
    assert len(copies(options)) == 2
    os.utime(description, (time.time() - UNUSED_AGE_S - 60,) * 2)
    assert tiled_tensors(write(tmp_path / "c.gguf", up=matrix(32, 64)), options) is not None
    assert len(copies(options)) == 2 and not description.exists()


def test_a_mapped_copy_is_not_removed(tmp_path, options) -> None:
    """On a network file system, processes of other hosts would be killed when they read it."""
    path = tmp_path / "a.gguf"
    old = write(path, up=matrix(32, 64))
    mapped = tiled_tensors(old, options)
    path.unlink()
    assert tiled_tensors(write(path, up=matrix(48, 64)), options) is not None
    assert mapped is not None and len(copies(options)) == 2
    del mapped
    path.unlink()
    assert tiled_tensors(write(path, up=matrix(64, 64)), options) is not None
    assert len(copies(options)) == 1


def test_a_file_that_was_replaced_after_it_was_opened_is_not_copied(tmp_path, options) -> None:
    """The copy would have the name of the old content."""
    path = tmp_path / "a.gguf"
    old = write(path, up=matrix(32, 64))
    write(tmp_path / "new.gguf", up=matrix(32, 64))
    (tmp_path / "new.gguf").replace(path)
    assert tiled_tensors(old, options) is None
    assert names(options) == ["lock"]
