"""Files that llama.cpp has written itself, without leading dimensions of 1, compute the same."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from runtime.engine.request import ImageSpan
from tests.families.agreement import load_decoder, random_tokens
from tests.families.encoder_configs import ENCODERS
from tests.families.encoder_references import REFERENCES
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.families.tower_families import TOWERS
from tests.families.towers import load_tower
from tests.peers.llama_cpp_library import their_file
from tests.tiny_models import write_tiny
from tests.unit.serve_app.replica.test_embedding_models import ask_file
from tests.unit.serve_app.replica.test_rerankers import (
    MODELS,
    QUERY,
    TEXTS,
    Original,
    write_single_matrix,
)

PLAIN = 0  # the type of all matrices: F32
# Architectures that it lacks, and configurations with tensors that it does not expect.
UNKNOWN = {
    ("deepseek2", "plain"),
    ("deepseek2", "yarn"),
    ("minicpm3", "queries_of_full_rank"),
    *(("mllama", name) for name in TEXT_MODELS["mllama"].configs),
}
PROJECTORS = [(f, c) for f, row in TOWERS.items() for c, kind in row.cases if kind == "llama.cpp"]
CASES = [(family, name) for family, row in TEXT_MODELS.items() for name in row.configs]


@pytest.mark.parametrize("name", [*ENCODERS, *REFERENCES])
def test_encoders_compute_the_same(name, tmp_path) -> None:
    path, tokens = tmp_path / "ours.gguf", random_tokens(30, seed=1)
    if name in REFERENCES:
        REFERENCES[name].write(path)
    else:
        write_tiny(path, ENCODERS[name], maker=AutoModel)
    ours, theirs = (states(each, tokens) for each in (path, their_copy(path)))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [*MODELS, "single_matrix"])
def test_rerankers_score_the_same(name, tmp_path) -> None:
    single = name == "single_matrix"
    path = write_single_matrix(tmp_path)[0] if single else Original(name, tmp_path).path
    body = {"text_1": QUERY, "text_2": list(TEXTS)}
    ours, theirs = (
        ask_file(each, "/v1/score", **body).json()["data"] for each in (path, their_copy(path))
    )
    assert ours == theirs


@pytest.mark.parametrize("family, name", [case for case in CASES if case not in UNKNOWN])
def test_text_models_compute_the_same(family, name, tmp_path) -> None:
    path, tokens = tmp_path / "ours.gguf", random_tokens(30, seed=1)
    TEXT_MODELS[family].write(path, name)
    ours, theirs = (
        PagedDecoder(load_decoder(each)).feed({0: tokens}) for each in (path, their_copy(path))
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family, name", PROJECTORS)
def test_projectors_load(family, name, tmp_path) -> None:
    row = TOWERS[family]
    load_tower(row.build, their_copy(row.write(tmp_path, name, flavour="llama.cpp").path))


def their_copy(path: Path) -> Path:
    return their_file(path, path.with_name("theirs.gguf"), PLAIN)


def states(path: Path, tokens: list[int]) -> torch.Tensor:
    cache = PagedDecoder(load_decoder(path))
    cache.show(0, [(ImageSpan(0, len(tokens), whole=True, digest=b""), torch.empty(0, 0))])
    return cache.states({0: tokens})
