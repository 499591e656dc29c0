"""The GGUF reader against the `gguf` package, and errors for damaged files."""

import gc
import os
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_zoo.gguf import header
from model_zoo.gguf.header import MAX_KEYS, MAX_METADATA_BYTES, MAX_TENSORS
from model_zoo.gguf.model_headers import ModelHeaders
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.gguf_files import Reader
from tests.reference_data import reference_data
from tests.tiny_models import write_tiny_llama
from tests.unit.model_zoo.gguf.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U8,
    U32,
    U64,
    Parts,
    array,
    pair,
    tensor,
    text,
    u32,
    u64,
)

MANY = 1 << 40
HUGE = (1 << 63) - 1


@pytest.fixture
def refused(tmp_path):
    """A function that writes bytes to a file and returns the message of the error."""

    def refuse(data: bytes, kind: type[ModelFileError] = ModelFileError) -> str:
        path = tmp_path / "broken.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelFileError) as caught:
            GGUFFile.open(path)
        assert type(caught.value) is kind
        assert str(path) in str(caught.value)
        return str(caught.value)

    return refuse


def write(path: Path, parts: Parts) -> GGUFFile:
    path.write_bytes(parts.bytes())
    return GGUFFile.open(path)


def same_as_package(path: Path) -> None:
    """Every key and every byte of every tensor are equal to those of the `gguf` package."""
    ours, theirs = GGUFFile.open(path), Reader(path)
    fields = {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in ours.metadata.items()}
    assert plain == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for entry in theirs.tensors:
        weight = ours.weight(entry.name)
        assert weight.shape == tuple(reversed(entry.shape.tolist()))
        assert weight.type.name == entry.tensor_type.name
        assert weight.data.numpy().tobytes() == entry.data.tobytes()


@pytest.mark.parametrize("type", ["F32", "F16", "Q8_0", "Q6_K"])
def test_files_read_as_the_gguf_package_reads_them(tmp_path, type) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config="rows_of_256", type=type)
    same_as_package(path)


@pytest.mark.parametrize("name", ["llama-spm", "gpt-2"])
def test_real_vocabularies_read_as_the_gguf_package_reads_them(name) -> None:
    same_as_package(reference_data(f"vocab/ggml-vocab-{name}.gguf"))


def test_version_2_reads_like_version_3(tmp_path) -> None:
    files = [write(tmp_path / f"{v}.gguf", Parts(version=v)) for v in (2, 3)]
    assert [file.version for file in files] == [2, 3]
    assert files[0].metadata == files[1].metadata == {"general.architecture": "llama"}


def test_a_file_whose_architecture_is_no_text_is_readable(tmp_path) -> None:
    """Only code that needs the architecture refuses it."""
    names = array(U32, 2, u32(1) + u32(2))
    file = write(tmp_path / "a.gguf", Parts(pairs=[pair("general.architecture", ARRAY, names)]))
    assert file.metadata["general.architecture"].tolist() == [1, 2]


def test_weights_are_views_of_the_file_and_outlive_it(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    data = np.arange(64, dtype=np.float32).tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = write(path, Parts(tensors=[tensor("a", [8, 8])], data=data))
        first, second = file.weight("a"), file.weight("a")
    assert first.data.data_ptr() == second.data.data_ptr()
    with path.open("r+b") as changed:
        changed.seek(file.tensors["a"].begin)
        changed.write(np.float32(-1).tobytes())
    del file
    gc.collect()
    assert first.dequantize()[0, :3].tolist() == [-1, 1, 2]


def test_a_tiny_alignment_is_read_correctly(tmp_path) -> None:
    parts = Parts(alignment=1, tensors=[tensor("a", [3]), tensor("b", [2], offset=12)])
    parts.pairs += [pair("general.alignment", U32, u32(1)), pair("odd", STRING, text("x"))]
    parts.pairs += [] if len(parts.header()) % 2 else [pair("even", U8, b"\0")]
    parts.data = np.arange(5, dtype=np.float32).tobytes()
    file = write(tmp_path / "packed.gguf", parts)
    assert file.tensors["a"].begin % 2 == 1
    assert file.weight("a").dequantize().tolist() == [0, 1, 2]
    assert file.weight("b").dequantize().tolist() == [3, 4]


def test_rows_join_only_if_contiguous_and_of_one_type(tmp_path) -> None:
    tensors = [
        tensor("a", [8, 2]),
        tensor("b", [8, 1], offset=64),
        tensor("c", [8, 2], type=1, offset=96),
        tensor("short", [4, 3], offset=128),
        tensor("after", [4, 1], offset=192),
    ]
    data = np.arange(64, dtype=np.float32).tobytes()
    file = write(tmp_path / "rows.gguf", Parts(tensors=tensors, data=data))
    joined = file.adjacent_rows(["a", "b"])
    assert joined is not None and joined.shape == (3, 8)
    assert joined.dequantize().flatten().tolist() == list(range(24))
    for apart in (["b", "a"], ["b", "c"], ["short", "after"], ["a", "short"]):
        assert file.adjacent_rows(apart) is None


def test_fetching_counts_every_byte_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("model_zoo.gguf.mapped._FETCH_BYTES", 5000)
    parts = Parts(tensors=[tensor("a", [100, 40])], data=bytes(16000))
    file = write(tmp_path / "big.gguf", parts)
    assert list(file.fetch("a")) == [5000, 5000, 5000, 1000]


def test_digest_names_the_header_and_the_size(tmp_path) -> None:
    data = np.zeros(8, np.float32).tobytes()
    parts = Parts(tensors=[tensor("a", [8])], data=data)
    first = write(tmp_path / "1.gguf", parts).digest
    assert write(tmp_path / "2.gguf", parts).digest == first
    assert len(bytes.fromhex(first)) == 32
    parts.data += b"\0"
    longer = write(tmp_path / "3.gguf", parts).digest
    parts.data, parts.tensors = data, [tensor("b", [8])]
    renamed = write(tmp_path / "4.gguf", parts).digest
    assert len({first, longer, renamed}) == 3


def test_invalid_utf_8_is_replaced(tmp_path) -> None:
    parts = Parts()
    parts.pairs += [
        pair("one", STRING, text(b"a\xff")),
        pair("many", ARRAY, array(STRING, 2, text(b"\xfe") + text("ä"))),
        pair("flags", ARRAY, array(BOOL, 2, b"\x00\x01")),
    ]
    metadata = write(tmp_path / "texts.gguf", parts).metadata
    assert metadata["one"] == "a\N{REPLACEMENT CHARACTER}"
    assert metadata["many"] == ["\N{REPLACEMENT CHARACTER}", "ä"]
    assert metadata["flags"].tolist() == [False, True]


def test_missing_empty_and_special_files_are_refused(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "empty.gguf").touch()
    for path, word in [
        (tmp_path / "missing.gguf", "no such file"),
        (tmp_path, "directory"),
        (pipe, "regular"),
        (tmp_path / "empty.gguf", "empty"),
        (tmp_path / "empty.gguf" / "below.gguf", "Not a directory"),
    ]:
        with pytest.raises(ModelFileError, match=word) as caught:
            GGUFFile.open(path)
        assert str(path) in str(caught.value)


def test_an_invalid_path_is_refused(tmp_path) -> None:
    with pytest.raises(ModelFileError, match="null byte"):
        GGUFFile.open(tmp_path / "a\0b.gguf")


@pytest.mark.parametrize(
    "begin, word",
    [
        (b"GG", "magic number"),
        (b"abcdefgh", "not a GGUF file"),
        (b"FUGG" + u32(3), "big-endian"),
        (b"GGUF" + b"\0\0\0\3" + bytes(16), "big-endian"),
        (u32(0x67676D6C), "GGML"),
        (u32(0x67676D66), "GGMF"),
        (u32(0x67676A74), "GGJT"),
        (u32(0x67676C61), "GGLA"),
        (b"PK\x03\x04" + bytes(30), "zip"),
        (u64(100) + b'{"a":{}}', "safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"version 2 of a poem, of no use here", "not a GGUF file"),
        (b"<!DOCTYPE html><html><body>Sign in", "web page"),
    ],
)
def test_other_formats_are_recognised_and_refused(refused, begin, word) -> None:
    assert word in refused(begin)


@pytest.mark.parametrize("version", [0, 1, 4, 1 << 20 | 1])
def test_other_versions_are_refused(refused, version) -> None:
    assert f"version is {version}; versions 2 and 3" in refused(Parts(version=version).bytes())


def test_a_file_truncated_anywhere_in_its_header_is_refused(refused) -> None:
    parts = Parts(tensors=[tensor("a", [8])], data=bytes(32))
    parts.pairs += [
        pair("texts", ARRAY, array(STRING, 2, text("ab") + text("c"))),
        pair("numbers", ARRAY, array(U32, 2, u32(1) + u32(2))),
        pair("flag", BOOL, b"\1"),
    ]
    whole = parts.bytes()
    for length in range(1, len(whole)):
        refused(whole[:length])


@pytest.mark.parametrize("name", ["tensor_count", "pair_count"])
@pytest.mark.parametrize("count, word", [(-1, "negative (-1)"), (MANY, "remaining"), (9, "hold")])
def test_invalid_counts_are_refused(refused, name, count, word) -> None:
    message = refused(Parts(**{name: count}).bytes())
    assert word in message
    assert {"tensor_count": "tensors", "pair_count": "metadata keys"}[name] in message


@pytest.mark.parametrize(
    "value, words",
    [
        (u32(STRING) + u64(1000), ["1,000 bytes long", "only 0 are left"]),
        (u32(STRING) + u64(-1), ["18,446,744,073,709,551,615 bytes long"]),
        (u32(ARRAY) + array(U32, MANY, b""), ["1,099,511,627,776", "hold 0"]),
        (u32(ARRAY) + array(U64, 2, u64(1)), ["length", "is 2", "hold 1"]),
        (u32(ARRAY) + array(STRING, 3, u64(0) * 2), ["length", "is 3", "hold 2"]),
        (u32(ARRAY) + array(STRING, 1, u64(5) + b"abc"), ["text 0", "5 bytes", "3 are left"]),
        (u32(ARRAY) + array(STRING, 2, text("abcdefgh")), ["text 1 of 2"]),
        (u32(ARRAY) + array(STRING, 1, u64(MANY) + bytes(8)), ["text 0", "are left"]),
        (u32(ARRAY) + array(U8, -1, b""), ["negative"]),
        (u32(ARRAY) + array(ARRAY, 1, array(U8, 1, b"\0")), ["array of arrays"]),
        (u32(ARRAY) + array(13, 1, bytes(8)), ["element type 13"]),
        (u32(13) + bytes(8), ["value type 13"]),
        (u32(F32) + b"\0\0", ["ends in", "4 bytes"]),
    ],
)
def test_invalid_values_are_refused(refused, value, words) -> None:
    parts = Parts()
    parts.pairs.append(text("the.key") + value)
    message = refused(parts.header())
    assert all(word in message for word in ["the.key", *words]), message


@pytest.mark.parametrize(
    "counts, word",
    [
        ({"pair_count": MAX_KEYS + 1}, f"has 16,385 metadata keys; {MAX_KEYS:,} is the limit"),
        ({"tensor_count": MAX_TENSORS + 1}, f"has 65,537 tensors; {MAX_TENSORS:,} is the limit"),
    ],
)
def test_too_many_keys_or_tensors_are_refused_by_their_count(tmp_path, counts, word) -> None:
    path = _sparse(tmp_path, Parts(**counts), size=1 << 30)
    with pytest.raises(ModelFileError, match=word):
        GGUFFile.open(path)


@pytest.mark.parametrize(
    "value",
    [
        u32(STRING) + u64(MAX_METADATA_BYTES),
        u32(ARRAY) + array(U8, MAX_METADATA_BYTES, b""),
        u32(ARRAY) + array(U64, MAX_METADATA_BYTES // 8, b""),
        u32(ARRAY) + array(STRING, 2, text("a") + u64(MAX_METADATA_BYTES)),
    ],
)
@pytest.mark.parametrize("kind", [GGUFFile, ModelHeaders])
def test_too_large_metadata_are_refused_before_reading(tmp_path, value, kind) -> None:
    path = _sparse(tmp_path, Parts(pairs=[text("the.key") + value]), size=1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(
            ModelFileError, match=r"`the\.key` .*metadata may take 134,217,728 bytes"
        ):
            kind.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_many_small_values_count_towards_the_limit_of_bytes(refused, monkeypatch) -> None:
    monkeypatch.setattr(header, "MAX_METADATA_BYTES", 1000)
    pairs = [pair(f"key.{i}", ARRAY, array(U8, 100, bytes(100))) for i in range(10)]
    assert "`key.7` is too long: the metadata may take 1,000" in refused(Parts(pairs=pairs).bytes())


def test_too_many_texts_in_one_or_several_arrays_are_refused(refused, monkeypatch) -> None:
    monkeypatch.setattr(header, "MAX_TEXTS", 10)
    texts = [(f"key.{i}", ARRAY, array(STRING, 4, text("a") * 4)) for i in range(3)]
    message = refused(Parts(pairs=[pair(*each) for each in texts]).bytes())
    assert "`key.2` has 4 texts; 10 in all arrays is the limit" in message


def test_too_long_names_are_refused_before_reading(tmp_path) -> None:
    for parts, limit in (
        (Parts(pairs=[u64(1 << 29)]), "key 0 has 536,870,912 bytes; 65,535"),
        (Parts(tensors=[u64(1 << 29)]), "tensor 0 has 536,870,912 bytes; 63"),
    ):
        path = _sparse(tmp_path, parts, size=1 << 30)
        tracemalloc.start()
        try:
            with pytest.raises(ModelFileError, match=limit):
                GGUFFile.open(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_header_as_large_as_those_of_the_largest_models_is_read(tmp_path) -> None:
    """More tensors, texts and bytes than any published file has, within the limits."""
    tokens, merges, experts = 300_000, 600_000, 20_000
    parts = Parts(tensors=[tensor(f"blk.{i}.w", [8], offset=32 * i) for i in range(experts)])
    parts.pairs += [pair(f"a.key.{i}", U32, u32(i)) for i in range(1000)]
    for name, count in (("tokens", tokens), ("merges", merges)):
        body = b"".join(text(f"text {i}") for i in range(count))
        parts.pairs.append(pair(f"a.{name}", ARRAY, array(STRING, count, body)))
    parts.pairs.append(pair("tokenizer.huggingface.json", STRING, text(b"x" * (40 << 20))))
    file = write(tmp_path / "large.gguf", replace(parts, data=bytes(32 * experts)))
    assert len(file.tensors) == experts and len(file.metadata["a.merges"]) == merges


def _sparse(folder: Path, parts: Parts, *, size: int) -> Path:
    """A sparse file of `size` bytes after its header, so that its counts are possible."""
    path = folder / "sparse.gguf"
    path.write_bytes(parts.header())
    os.truncate(path, size)
    return path


def test_empty_duplicate_and_undecodable_names_are_refused(refused) -> None:
    one = Parts()
    twice = pair("a.b", U8, b"\1")
    assert "key 1 is empty" in refused(Parts(pairs=[*one.pairs, pair("", U8, b"\1")]).bytes())
    assert "`a.b` occurs twice" in refused(Parts(pairs=[twice, twice]).bytes())
    assert "UTF-8" in refused(Parts(pairs=[pair(b"\xff", U8, b"\1")]).bytes())
    assert "UTF-8" in refused(Parts(tensors=[tensor(b"\xff", [8])], data=bytes(32)).bytes())
    doubled = [tensor("a", [8]), tensor("a", [8], offset=32)]
    assert "tensor `a` occurs twice" in refused(Parts(tensors=doubled, data=bytes(64)).bytes())


@pytest.mark.parametrize(
    "kind, value, word",
    [
        (U64, u64(32), "value type 10"),
        (STRING, text("32"), "value type 8"),
        (U32, u32(0), "is 0; it must be a power of two"),
        (U32, u32(48), "is 48; it must be a power of two"),
    ],
)
def test_invalid_alignments_are_refused(refused, kind, value, word) -> None:
    message = refused(Parts(pairs=[pair("general.alignment", kind, value)]).bytes())
    assert "general.alignment" in message and word in message


@pytest.mark.parametrize(
    "entry, words",
    [
        (tensor("n" * 64, [8]), ["64 bytes", "63 is the limit"]),
        (tensor("a", [1, 1, 1, 1, 8]), ["`a`", "5 dimensions", "1 to 4"]),
        (tensor("a", [], count=0), ["`a`", "0 dimensions"]),
        (tensor("a", [8], count=1 << 31), ["`a`", "2,147,483,648 dimensions"]),
        (tensor("a", [8, -1]), ["`a`", "negative dimension (-1)"]),
        (tensor("a", [HUGE, 2]), ["`a`", "2^63 - 1"]),
        (tensor("a", [1 << 32, 1 << 32, 0]), ["`a`", "2^63 - 1"]),
        (tensor("a", [33, 2], type=8), ["`a`", "rows of 33", "32 in a block of Q8_0"]),
        (tensor("a", [8], offset=32), ["`a`", "offset 32", "end at 0"]),
        (tensor("a", [8], offset=HUGE), ["`a`", "offset 9,223,372,036,854,775,807"]),
        (tensor("a", [9]), ["`a`", "truncated"]),
        (tensor("a", [1 << 60]), ["`a`", "truncated"]),
    ],
)
def test_invalid_tensors_are_refused(refused, entry, words) -> None:
    message = refused(Parts(tensors=[entry], data=bytes(32)).bytes())
    assert all(word in message for word in words), message


def test_tensors_with_a_gap_or_an_overlap_are_refused(refused) -> None:
    for offset in (0, 16, 64, 4):
        tensors = [tensor("a", [8]), tensor("b", [8], offset=offset)]
        message = refused(Parts(tensors=tensors, data=bytes(128)).bytes())
        assert "`b`" in message and "end at 32" in message


@pytest.mark.parametrize(
    "number, word",
    [
        (4, "id 4"),
        (5, "id 5"),
        (33, "id 33"),
        (1 << 31, "id 2147483648"),
        (9, "Q8_1"),
        (15, "Q8_K"),
        (36, "id 36"),
    ],
)
def test_unsupported_types_are_reported(refused, number, word) -> None:
    data = Parts(tensors=[tensor("a", [256], type=number)], data=bytes(2048)).bytes()
    message = refused(data, UnsupportedModelError)
    assert word in message and "`a`" in message and "Q4_K" in message


@settings(max_examples=300)
@given(
    cut=st.integers(0, 400), changes=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=9)))
)
def test_damaged_files_raise_model_file_errors_only(tmp_path_factory, cut, changes) -> None:
    parts = Parts(tensors=[tensor("a", [8, 2]), tensor("b", [32], type=8, offset=64)])
    parts.pairs += [pair("texts", ARRAY, array(STRING, 2, text("ab") + text("c")))]
    data = bytearray(parts.bytes() + bytes(64 + 34))
    for position, change in changes:
        data[position : position + len(change)] = change
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data[: len(data) - cut])
    try:
        file = GGUFFile.open(path)
    except ModelFileError:
        return
    for name in file.tensors:
        assert file.weight(name).dequantize().shape == file.tensors[name].shape
