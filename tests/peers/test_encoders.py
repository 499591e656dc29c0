"""Encoders that `transformers` lacks, in llama.cpp, except the one whose rows of ups it takes for
gates."""

import pytest
import torch

from tests.families.agreement import random_tokens
from tests.families.encoder_references import REFERENCES, UPS_FIRST
from tests.peers.llama_cpp_library import their_vectors

NEAR = 0.02  # of components of about one: its curves are tables of half precision


@pytest.mark.parametrize("name", [name for name in REFERENCES if name != UPS_FIRST])
def test_llama_cpp_embeds_as_the_reference_does(name, tmp_path) -> None:
    path, tokens = tmp_path / "tiny.gguf", random_tokens(41, seed=1)
    states = REFERENCES[name].states(REFERENCES[name].write(path), tokens)
    found = torch.from_numpy(their_vectors(path, [tokens], ranks=False)[0])
    assert (found - states.mean(0)).abs().max() < NEAR
