"""Partial reading of GGUF files, and files that change while they are read."""

import os

import numpy as np
import pytest

from model_zoo.gguf.model_headers import ModelHeaders
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError
from tests.tiny_models import write_tiny_llama
from tests.unit.model_zoo.gguf.gguf_bytes import (
    ARRAY,
    STRING,
    U32,
    Parts,
    array,
    pair,
    tensor,
    text,
    u64,
)

MANY = 1 << 40


def test_reading_without_arrays_checks_everything_else(tmp_path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_llama(path)
    whole, light = GGUFFile.open(path), ModelHeaders.open(path)
    plain = {
        key for key, value in whole.metadata.items() if not isinstance(value, (list, np.ndarray))
    }
    assert dict(light.metadata) == {key: whole.metadata[key] for key in plain}
    assert len(plain) < len(whole.metadata)
    assert light.kinds == whole.kinds and light.tensors == whole.tensors
    key = pair("a", ARRAY, array(STRING, 1, text("b")))
    for broken in (
        Parts(pairs=[key, key]),
        Parts(pairs=[pair("a", ARRAY, array(STRING, 2, text("b") + u64(MANY)))]),
        Parts(pairs=[pair("a", ARRAY, array(U32, MANY, b""))]),
        Parts(pairs=[pair("a", ARRAY, array(99, 0, b""))]),
        Parts(pairs=[pair("general.alignment", ARRAY, array(U32, 0, b""))]),
    ):
        path.write_bytes(broken.bytes())
        with pytest.raises(ModelFileError, match=r"`a`|text 1 of|alignment"):
            ModelHeaders.open(path)


@pytest.mark.parametrize("size", [15_000, 17_000])
def test_a_change_of_the_file_size_during_fetching_is_an_error(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr("model_zoo.gguf.mapped._FETCH_BYTES", 5000)
    path = tmp_path / "big.gguf"
    parts = Parts(tensors=[tensor("a", [100, 40])], data=bytes(16000))
    path.write_bytes(parts.bytes())
    fetching = GGUFFile.open(path).fetch("a")
    assert next(fetching) == 5000
    os.truncate(path, size)
    with pytest.raises(ModelFileError, match=rf"big.gguf: has {size:,} bytes, but had 16,"):
        next(fetching)
