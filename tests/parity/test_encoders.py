"""States of text encoders against `transformers`, float32, eager, on tiny random models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, DistilBertConfig, DistilBertModel

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.registry import load
from runtime.engine.request import ImageSpan
from runtime.errors import ModelFileError
from runtime.worker.model import DecoderModel
from tests.adapter_files import write_adapter
from tests.families.agreement import QUANTIZED_TYPES, load_decoder, random_tokens
from tests.families.encoder_configs import ENCODERS, LARGE, SIZES
from tests.families.encoder_references import REFERENCES
from tests.families.paged_decoder import PagedDecoder
from tests.gguf_files import matrices, rewrite
from tests.memory_profile import peak_bytes, recorded_memory
from tests.parity.test_adapters import decoder_with
from tests.tiny_models import write_tiny

TOLERANCE = 2e-5  # of states, whose components are about one


@dataclass(frozen=True)
class Pair:
    encoder: DecoderModel
    expected: Callable[[list[int]], Tensor]


def states_of(twin: Any) -> Callable[[list[int]], Tensor]:
    @torch.inference_mode()
    def states(tokens: list[int]) -> Tensor:
        return twin(torch.tensor([tokens])).last_hidden_state[0]

    return states


@pytest.fixture(scope="module", params=[*ENCODERS, *REFERENCES])
def pair(request, tmp_path_factory) -> Pair:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    if request.param in REFERENCES:
        reference = REFERENCES[request.param]
        expected = partial(reference.states, reference.write(path))
    else:
        expected = states_of(write_tiny(path, ENCODERS[request.param], maker=AutoModel))
    return Pair(load_decoder(path), expected)


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


def test_an_adapter_of_a_task_is_added_to_matrices_and_both_embeddings(tmp_path) -> None:
    """As llama.cpp's converter writes those of Jina Embeddings v3: the pair of `token_types` is
    that of a matrix, also where llama-quantize has written the model, that of `token_embd` has the
    rows first."""
    path, generator = tmp_path / "tiny.gguf", np.random.default_rng(1)
    write_tiny(path, ENCODERS["jina_bert_v3"], maker=AutoModel)
    pairs, merged = {}, {}
    for name, matrix in matrices(path).items():
        if matrix.ndim > 1:
            rows, width = matrix.shape
            down, up = (
                generator.standard_normal(shape).astype(np.float32) / 4
                for shape in ((4, width), (rows, 4))
            )
            pairs[name] = (up, down.T) if name == "token_embd.weight" else (down, up)
            merged[name] = matrix + up @ down * 8 / 4
    write_adapter(tmp_path / "task.gguf", pairs, architecture="jina-bert-v3", alpha=8.0)
    rewrite(path, tmp_path / "merged.gguf", tensors=merged)
    tokens, adapter = random_tokens(41, seed=8), AdapterPath(tmp_path / "task.gguf")
    vector = {"token_types.weight": matrices(path)["token_types.weight"][0]}
    quantised = rewrite(path, tmp_path / "quantised.gguf", tensors=vector)
    expected, *found = (
        paged(encoder, tokens).states({0: tokens})
        for encoder in (
            load_decoder(tmp_path / "merged.gguf"),
            decoder_with(path, adapter),
            decoder_with(quantised, adapter),
        )
    )
    assert all((states - expected).abs().max() <= TOLERANCE for states in found)


def test_slopes_are_not_computed_for_more_heads_than_fit(tmp_path) -> None:
    REFERENCES["jina-bert-v2"].write(tmp_path / "tiny.gguf")
    sizes = {"head_count": 1 << 30, "key_length": 2, "value_length": 2}
    keys = {f"attention.{name}": value for name, value in sizes.items()}
    path = rewrite(tmp_path / "tiny.gguf", tmp_path / "many.gguf", own_keys=keys)
    with pytest.raises(ModelFileError, match=r"attention\.head_count` is 1,073,741,824"):
        load_decoder(path)


def test_a_modern_bert_may_have_the_head_for_masked_tokens(tmp_path) -> None:
    """It is no reranker: these lack the last matrix."""
    write_tiny(tmp_path / "tiny.gguf", ENCODERS["modern_bert"], maker=AutoModel)
    head = {"cls.weight": np.ones((64, 64), np.float32), "cls.norm.weight": np.ones(64, np.float32)}
    path = rewrite(tmp_path / "tiny.gguf", tmp_path / "masked.gguf", tensors=head)
    model = load(path, device=torch.device("cpu"), dtype=torch.float32)
    assert model.ranking is None and model.description.pooling is None


# Names of the parameters of BertModel, and of DistilBertModel.
DISTILLED = {
    "encoder.layer.": "transformer.layer.",
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}


def distilled(bert: Any) -> DistilBertModel:
    """DistilBERT with the weights of `bert`, but without token types and pooler."""
    sizes = {
        "dim": SIZES["hidden_size"],
        "hidden_dim": SIZES["intermediate_size"],
        "n_heads": SIZES["num_attention_heads"],
        "n_layers": SIZES["num_hidden_layers"],
        "max_position_embeddings": SIZES["max_position_embeddings"],
    }
    model = DistilBertModel(DistilBertConfig(**sizes, vocab_size=bert.config.vocab_size)).eval()
    weights = {}
    for name, weight in bert.state_dict().items():
        for old, new in DISTILLED.items():
            name = name.replace(old, new)
        weights[name] = weight
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def test_distilbert_has_no_token_types_though_its_files_state_one(tmp_path) -> None:
    """llama.cpp's converter writes a count of one for configurations without a number of types."""
    bert = write_tiny(tmp_path / "tiny.gguf", ENCODERS["bert_without_segments"], maker=AutoModel)
    count = {"tokenizer.ggml.token_type_count": 1}
    path = rewrite(
        tmp_path / "tiny.gguf",
        tmp_path / "distilled.gguf",
        keys=count,
        tensors={"token_types.weight": None},
    )
    pair, tokens = Pair(load_decoder(path), states_of(distilled(bert))), random_tokens(41, seed=7)
    states = paged(pair.encoder, tokens).states({0: tokens})
    assert (states - pair.expected(tokens)).abs().max() <= TOLERANCE


def test_several_token_types_need_their_embedding(tmp_path) -> None:
    write_tiny(tmp_path / "tiny.gguf", ENCODERS["bert"], maker=AutoModel)
    tensors = {"token_types.weight": None}
    path = rewrite(tmp_path / "tiny.gguf", tmp_path / "damaged.gguf", tensors=tensors)
    with pytest.raises(ModelFileError, match=r"1 is missing \(token_types\.weight\)"):
        load_decoder(path)


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
