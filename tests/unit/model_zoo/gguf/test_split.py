"""Models split over several files: read as one, with an error for each inconsistency."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from runtime.errors import ModelFileError
from tests.gguf_files import finish
from tests.tiny_models import write_tiny_llama
from tests.unit.model_zoo.gguf.gguf_bytes import STRING, U32, Parts, pair, tensor, text, u32

CPU = torch.device("cpu")
FIRST = "m-00001-of-00003.gguf"


@dataclass
class Piece:
    """A part to write; each tensor has eight float32 numbers."""

    number: int | None
    count: int | None = 3
    tensors: dict[str, float] = field(default_factory=dict)
    total: int | None = None

    def write(self, path: Path) -> None:
        parts = Parts()
        keys = {"split.no": self.number, "split.count": self.count}
        keys["split.tensors.count"] = self.total
        parts.pairs += [pair(k, U32, u32(v)) for k, v in keys.items() if v is not None]
        parts.tensors = [tensor(n, [8], offset=32 * i) for i, n in enumerate(self.tensors)]
        values = [np.full(8, v, np.float32).tobytes() for v in self.tensors.values()]
        parts.data = b"".join(values)
        path.write_bytes(parts.bytes())


def three(**changes: Piece | None) -> dict[str, Piece | None]:
    """Writes a valid model of three parts; `second=None` omits the second one."""
    pieces = {
        "first": Piece(0, tensors={"a": 1, "b": 2}, total=4),
        "second": Piece(1, tensors={"c": 3}),
        "third": Piece(2, tensors={"d": 4}),
    }
    return {**pieces, **changes}


def write(folder: Path, pieces: dict[str, Piece | None]) -> Path:
    for number, piece in enumerate(pieces.values(), start=1):
        if piece is not None:
            piece.write(folder / f"m-{number:05}-of-00003.gguf")
    return folder / FIRST


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    return str(caught.value)


def split_like_a_converter(source: Path, folder: Path, *, tensors_each: int) -> Path:
    """`source` split by the writer of the `gguf` package."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(
        folder / "tiny.gguf", architecture, split_max_tensors=tensors_each, use_temp_file=False
    )
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = [*entry.types, None]
            writer.add_key_value(name, entry.contents(), kinds[0], kinds[1])
    for entry in reader.tensors:
        writer.add_tensor(entry.name, entry.data, raw_dtype=entry.tensor_type)
    finish(writer)
    return min(folder.glob("tiny-*.gguf"))


def test_a_model_split_by_the_gguf_package_generates_the_same_tokens(tmp_path) -> None:
    whole = tmp_path / "whole.gguf"
    write_tiny_llama(whole, type="Q8_0")
    first = split_like_a_converter(whole, tmp_path, tensors_each=5)
    files = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(files) > 2 and first.name == f"tiny-00001-of-{len(files):05}.gguf"
    one, many = GGUFFile.open(whole), GGUFFile.open(first)
    assert list(many.tensors) == list(one.tensors)
    for name in one.tensors:
        assert torch.equal(many.weight(name).data, one.weight(name).data), name
        assert sum(many.fetch(name)) == one.tensors[name].nbytes
    loaded = load(first, device=CPU, dtype=torch.float32)
    facts = loaded.description
    assert facts.file_bytes == sum(path.stat().st_size for path in files)
    expected = load(whole, device=CPU, dtype=torch.float32).description
    assert facts.parameter_count == expected.parameter_count
    assert facts.weight_bytes == expected.weight_bytes
    assert loaded.prepare_text("the fox").tokens


def test_tensors_come_from_the_part_that_has_them(tmp_path) -> None:
    file = GGUFFile.open(write(tmp_path, three()))
    assert {n: file.weight(n).dequantize()[0].item() for n in file.tensors} == {
        "a": 1,
        "b": 2,
        "c": 3,
        "d": 4,
    }
    assert file.stem == "m"


def test_rows_join_within_a_part_only(tmp_path) -> None:
    """The tensor `b` begins at the offset in its part at which the first part's tensor ends."""
    long = "a" * 34  # takes as much room in a header as two tensors of one letter
    Piece(0, count=2, tensors={long: 1}, total=3).write(tmp_path / "m-00001-of-00002.gguf")
    other = Piece(1, count=2, tensors={"x": 2, "b": 3}, total=3)
    other.write(tmp_path / "m-00002-of-00002.gguf")
    file = GGUFFile.open(tmp_path / "m-00001-of-00002.gguf")
    assert file.tensors["b"].begin == file.tensors[long].begin + file.tensors[long].nbytes
    assert file.adjacent_rows(["x", "b"]) is not None
    assert file.adjacent_rows([long, "b"]) is None


def test_the_digest_covers_every_part(tmp_path) -> None:
    path = write(tmp_path, three())
    digest = GGUFFile.open(path).digest
    assert GGUFFile.open(path).digest == digest
    third = tmp_path / "m-00003-of-00003.gguf"
    third.write_bytes(third.read_bytes() + b"\0")
    assert GGUFFile.open(path).digest != digest
    Piece(2, tensors={"e": 4}).write(third)
    assert GGUFFile.open(path).digest != digest


def test_a_split_count_of_one_is_a_single_file(tmp_path) -> None:
    for count in (0, 1):
        path = tmp_path / "alone.gguf"
        Piece(0, count=count, tensors={"a": 1}).write(path)
        assert list(GGUFFile.open(path).tensors) == ["a"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"second": None}, ["m-00002-of-00003.gguf", "no such file"]),
        (
            {"third": Piece(1, tensors={"d": 4})},
            ["m-00003-of-00003.gguf", "`split.no` is 1", "must be 2"],
        ),
        ({"third": Piece(None, tensors={"d": 4})}, ["m-00003", "has no `split.no`"]),
        (
            {"second": Piece(1, count=4, tensors={"c": 3})},
            ["m-00002", "`split.count` is 4", "first part says 3"],
        ),
        ({"third": Piece(2, tensors={"b": 4})}, ["m-00003", "tensor `b` is in", FIRST]),
        ({"third": Piece(2)}, ["`split.tensors.count` is 4", "3 parts hold 3"]),
        (
            {"first": Piece(0, tensors={"a": 1, "b": 2})},
            ["has no `split.tensors.count`"],
        ),
        ({"first": Piece(0, count=2, total=4)}, ["`split.count` is 2", "name states 3 files"]),
        ({"first": Piece(1, total=4)}, ["is part 2 of a split model", f"first part, {FIRST}"]),
        ({"first": Piece(None, total=4)}, ["has no `split.no`"]),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, changes, words) -> None:
    message = refusal(write(tmp_path, three(**changes)))
    assert all(word in message for word in words), message


def test_a_later_part_names_the_first(tmp_path) -> None:
    path = write(tmp_path, three()).with_name("m-00002-of-00003.gguf")
    message = refusal(path)
    assert str(path) in message and "is part 2" in message and FIRST in message


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-1-of-3.gguf", "m-00001-of-00003", "-00001-of-00003.gguf"]
)
def test_a_name_without_the_part_pattern_is_refused(tmp_path, name) -> None:
    path = tmp_path / name
    shutil.copy(write(tmp_path, three()), path)
    message = refusal(path)
    assert "-00001-of-00003.gguf" in message and "3 split files" in message


def test_a_first_part_with_the_name_of_another_is_refused(tmp_path) -> None:
    first = write(tmp_path, three())
    second = first.with_name("m-00002-of-00003.gguf")
    shutil.copy(first, second)
    assert f"name it {FIRST}" in refusal(second)


@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
def test_invalid_split_keys_are_refused(tmp_path, key) -> None:
    path = write(tmp_path, three())
    values = {"split.no": 0, "split.count": 3, "split.tensors.count": 4}
    parts = Parts()
    for name, value in values.items():
        given = pair(name, STRING, text("three")) if name == key else pair(name, U32, u32(value))
        parts.pairs.append(given)
    parts.tensors = [tensor("a", [8]), tensor("b", [8], offset=32)]
    parts.data = bytes(64)
    path.write_bytes(parts.bytes())
    message = refusal(path)
    assert f"`{key}` is 'three', not a count" in message


OPEN_AND_MEASURE = """
import re, sys, tracemalloc
from tests.gguf_files import finish
from model_zoo.gguf.reader import GGUFFile
tracemalloc.start()
file = GGUFFile.open(sys.argv[1])
file.digest, file.size_bytes, [file.weight(name) for name in file.tensors]
_, peak = tracemalloc.get_traced_memory()
maps = open("/proc/self/smaps").read()
resident = sum(int(kb) for kb in re.findall(r"huge-[^\\n]*\\n(?:.*\\n)*?Rss: +(\\d+) kB", maps))
print(file.size_bytes, peak, resident * 1024, len(file.tensors))
"""


def test_opening_forty_gigabytes_reads_only_headers(tmp_path) -> None:
    """Sparse files: the resident pages of the maps are those that were read."""
    gigabytes = 20
    rows = gigabytes * (1 << 30) // 4096
    for number in (0, 1):
        parts = Parts(tensors=[tensor(f"t{number}", [1024, rows])])
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        parts.pairs += [pair(name, U32, u32(value)) for name, value in keys.items()]
        path = tmp_path / f"huge-{number + 1:05}-of-00002.gguf"
        path.write_bytes(parts.bytes())
        os.truncate(path, len(parts.bytes()) + rows * 4096)
    first = tmp_path / "huge-00001-of-00002.gguf"
    done = subprocess.run(
        [sys.executable, "-c", OPEN_AND_MEASURE, str(first)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    size, allocated, resident, tensors = map(int, done.stdout.split())
    assert size > 2 * gigabytes << 30 and tensors == 2
    assert allocated < 1 << 20
    assert 0 < resident < 1 << 20
