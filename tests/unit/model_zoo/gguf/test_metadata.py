"""Typed metadata: tolerant of the types that converters write, strict about values."""

from pathlib import Path

import numpy as np
import pytest

from model_zoo.gguf.metadata import Metadata
from runtime.errors import ModelFileError

PATH = Path("some/model.gguf")


def metadata(**values) -> Metadata:
    named = {f"llama.{key}": value for key, value in values.items()}
    return Metadata({"general.architecture": "llama", "tokenizer.x": 7, **named}, path=PATH)


def test_keys_are_prefixed_by_the_architecture_except_shared_ones() -> None:
    read = metadata(block_count=3)
    assert read.architecture == "llama"
    assert read.require("block_count", int) == 3
    assert read.require("tokenizer.x", int) == 7
    assert read.require("general.architecture", str) == "llama"


@pytest.mark.parametrize(
    "stored, kind, read",
    [
        (5, int, 5),
        (np.uint64(5), int, 5),
        (5.0, int, 5),
        (5, float, 5.0),
        (1, bool, True),
        (False, bool, False),
        ("text", str, "text"),
    ],
)
def test_lossless_conversions_are_accepted(stored, kind, read) -> None:
    value = metadata(key=stored).require("key", kind)
    assert value == read and type(value) is kind


@pytest.mark.parametrize(
    "stored, kind",
    [
        (5.5, int),
        (float("inf"), int),
        (float("nan"), float),
        (True, int),
        (True, float),
        ("5", int),
        (2, bool),
        (1.0, bool),
        ([5], int),
        (np.array([5, 5]), int),
        (np.array([1]), bool),
        (5, str),
    ],
)
def test_other_types_are_refused_with_key_and_file(stored, kind) -> None:
    with pytest.raises(ModelFileError, match=r"some/model\.gguf: `llama\.key` is .*, not "):
        metadata(key=stored).require("key", kind)


def test_missing_keys_are_reported_or_have_the_default() -> None:
    with pytest.raises(ModelFileError, match=r"some/model\.gguf: `llama\.key` is missing"):
        metadata().require("key", int)
    with pytest.raises(ModelFileError, match=r"`general\.architecture` is missing"):
        Metadata({}, path=PATH)
    assert metadata().get("key", int, 4) == 4
    assert metadata().get("key", str) is None
    assert metadata().get_array("key", int) is None


@pytest.mark.parametrize("value", [0, -3, 1 << 31])
def test_sizes_outside_their_bounds_are_refused(value) -> None:
    with pytest.raises(ModelFileError, match=r"`llama\.key` is"):
        metadata(key=value).require_size("key")
    with pytest.raises(ModelFileError, match="8 is the limit"):
        metadata(key=9).require_size("key", at_most=8)
    with pytest.raises(ModelFileError, match="above 0"):
        metadata(key=0.0).get_positive("key")


def test_a_single_value_counts_for_every_layer() -> None:
    assert metadata(key=4).require_per_layer("key", 3) == (4, 4, 4)
    assert metadata(key=np.array([1, 2, 3])).require_per_layer("key", 3) == (1, 2, 3)
    assert metadata().get_per_layer("key", 2, (8, 9)) == (8, 9)
    with pytest.raises(ModelFileError, match="2 entries for 3 layers"):
        metadata(key=np.array([1, 2])).require_per_layer("key", 3)
    with pytest.raises(ModelFileError, match="is 0"):
        metadata(key=np.array([1, 0])).require_per_layer("key", 2)


def test_arrays_are_converted_element_by_element() -> None:
    assert metadata(key=np.array([1.0, 2.0])).require_array("key", int) == (1, 2)
    assert metadata(key=["a", "b"]).require_array("key", str) == ("a", "b")
    assert metadata(key=["a", "b"]).length("key") == 2
    assert metadata(key=3).length("key") is None
    with pytest.raises(ModelFileError, match="not an array"):
        metadata(key=3).require_array("key", int)
    with pytest.raises(ModelFileError, match="not an integer"):
        metadata(key=["a"]).require_array("key", int)


def test_infinite_numbers_are_accepted_only_where_allowed() -> None:
    numbers = metadata(key=np.array([-np.inf, 0.5], np.float32))
    assert numbers.require_array("key", float, infinite=True) == (float("-inf"), 0.5)
    with pytest.raises(ModelFileError, match="not a number"):
        numbers.require_array("key", float)
    with pytest.raises(ModelFileError, match="not a number"):
        metadata(key=np.array([np.nan])).require_array("key", float, infinite=True)
