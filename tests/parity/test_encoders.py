"""States of text encoders against `transformers`, float32, eager, on tiny random models."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from runtime.engine.request import ImageSpan
from runtime.worker.model import DecoderModel
from tests.families.agreement import QUANTIZED_TYPES, load_decoder, random_tokens
from tests.families.encoder_configs import ENCODERS, LARGE
from tests.families.paged_decoder import PagedDecoder
from tests.gguf_files import matrices, rewrite
from tests.memory_profile import peak_bytes, recorded_memory
from tests.tiny_models import write_tiny

TOLERANCE = 2e-5  # of states, whose components are about one


@dataclass(frozen=True)
class Pair:
    encoder: DecoderModel
    twin: Any

    def expected(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.twin(torch.tensor([tokens])).last_hidden_state[0]


@pytest.fixture(scope="module", params=ENCODERS)
def pair(request, tmp_path_factory) -> Pair:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    twin = write_tiny(path, ENCODERS[request.param], maker=AutoModel)
    return Pair(load_decoder(path), twin)


def paged(encoder: DecoderModel, *texts: list[int]) -> PagedDecoder:
    """A cache with a text in each slot, with attention in both directions."""
    cache = PagedDecoder(encoder)
    for slot, tokens in enumerate(texts):
        whole = ImageSpan(0, len(tokens), whole=True, digest=b"")
        cache.show(slot, [(whole, torch.empty(0, 0))])
    return cache


def test_states_of_a_text_agree(pair) -> None:
    tokens = random_tokens(41, seed=1)
    states = paged(pair.encoder, tokens).states({0: tokens})
    assert (states - pair.expected(tokens)).abs().max() <= TOLERANCE


def test_two_texts_in_one_batch_agree(pair) -> None:
    one, two = random_tokens(23, seed=2), random_tokens(60, seed=3)
    states = paged(pair.encoder, one, two).states({1: two, 0: one})
    expected = torch.cat([pair.expected(two), pair.expected(one)])
    assert (states - expected).abs().max() <= TOLERANCE


def test_the_requested_rows_are_returned(pair) -> None:
    tokens = random_tokens(30, seed=4)
    states = paged(pair.encoder, tokens).states({0: tokens}, outputs=[29, 0])
    assert (states - pair.expected(tokens)[[29, 0]]).abs().max() <= TOLERANCE


def test_a_step_allocates_no_more_than_it_declares(pair) -> None:
    tokens = random_tokens(100, seed=5)
    cache = paged(pair.encoder, tokens)
    batch = cache.batch({0: tokens})
    pair.encoder.states(batch, cache.cache)
    with recorded_memory() as recorded:
        pair.encoder.states(batch, cache.cache)
    assert 0 < peak_bytes(recorded) <= pair.encoder.activation_bytes(100, 100)


@pytest.mark.parametrize("config", LARGE)
@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree_with_their_dequantised_weights(tmp_path, config, type) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, LARGE[config], type=type, maker=AutoModel)
    keys = {"general.architecture": config.replace("_", "-")}
    plain = rewrite(path, tmp_path / "plain.gguf", keys=keys, tensors=dict(matrices(path)))
    tokens = random_tokens(41, seed=6)
    one, other = (
        paged(encoder, tokens).states({0: tokens})
        for encoder in (load_decoder(path), load_decoder(plain))
    )
    assert (one - other).abs().max() <= TOLERANCE
