"""Embedding models from checkpoint to answer: their tokenizers, pooling and endpoints.

Each model is saved by `transformers`, converted, loaded and called over HTTP. Its vectors must be
those that the saved model and tokenizer give for the same texts.
"""

import asyncio
import base64
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    EuroBertConfig,
    Gemma3TextConfig,
    JinaEmbeddingsV3Config,
    ModernBertConfig,
    NomicBertConfig,
    Qwen3Config,
)

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.tensors import META
from model_zoo.registry import LoadOptions, load
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import ModelFileError, UnsupportedModelError
from serve_app.config.options import Options
from serve_app.config.settings import ModelSettings
from serve_app.replica.file_headers import listed_file
from serve_app.replica.loading import load_replica
from serve_app.replica.replica import ModelReplica
from tests.dense_modules import write_dense
from tests.families.encoder_configs import GEMMA
from tests.families.encoder_references import REFERENCES
from tests.gguf_files import matrices, rewrite
from tests.tiny_models import write_tiny_folder
from tests.tiny_vocabularies import (
    TEXTS,
    save_byte_pieces,
    save_framed_bytes,
    save_unigram,
    save_word_pieces,
)
from tests.unit.serve_app.cli.cli_runs import said
from tests.unit.serve_app.fake_replicas import http_client

TOLERANCE = 2e-5  # of components of vectors of length one
CONTEXT = 128
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
}
FAR_TOO_LONG = "the quick brown fox jumps over the lazy dog. " * 40
# Longer in characters than any text of as many tokens, but not in tokens.
LONG_IN_CHARACTERS = (" " * 3000 + "hello world", "hello " + "z" * 3000 + " world")


@dataclass(frozen=True)
class Original:
    """A saved model and its tokenizer, as `transformers` runs them; `pool`: states [n, hidden];
    `replica`: one that serves `path`, if several tests ask it."""

    model: Any
    tokenizer: Any
    pool: Callable[[torch.Tensor], torch.Tensor]
    path: Path
    replica: ModelReplica | None = None

    def tokens(self, text: str, at_most: int = CONTEXT) -> list[int]:
        return self.tokenizer(text, truncation=True, max_length=at_most)["input_ids"]

    def raw(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            states = self.model(torch.tensor([list(tokens)])).last_hidden_state[0]
        return self.pool(states).numpy()

    def vectors(self, texts: Sequence[str], at_most: int = CONTEXT) -> np.ndarray:
        return np.stack([unit(self.raw(self.tokens(text, at_most))) for text in texts])


# Matrices that follow pooling, by their modules in a sentence transformer.
DENSE = {
    "2_Dense": torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) / 8,
    "3_Dense": torch.randn(64, 96, generator=torch.Generator().manual_seed(2)) / 8,
}
GEMMA_SIZES = SIZES | GEMMA | {"num_hidden_layers": 7}
MODELS = {
    "bert_mean": (BertConfig(**SIZES), "mean_tokens", lambda states: states.mean(0)),
    "bert_cls": (BertConfig(**SIZES), "cls_token", lambda states: states[0]),
    "eurobert_last": (
        EuroBertConfig(**SIZES, num_key_value_heads=2),
        "lasttoken",
        lambda states: states[-1],
    ),
    "gemma_embedding_mean": (
        Gemma3TextConfig(**GEMMA_SIZES),
        "mean_tokens",
        lambda states: DENSE["3_Dense"] @ (DENSE["2_Dense"] @ states.mean(0)),
    ),
    "gemma3_last": (
        Gemma3TextConfig(**GEMMA_SIZES | {"use_bidirectional_attention": False}),
        "lasttoken",
        lambda states: states[-1],
    ),
    "jina_bert_v3_mean": (
        JinaEmbeddingsV3Config(**SIZES),
        "mean_tokens",
        lambda states: states.mean(0),
    ),
    "modern_bert_cls": (
        ModernBertConfig(**SIZES, local_attention=16),
        "cls_token",
        lambda states: states[0],
    ),
    "nomic_bert_mean": (NomicBertConfig(**SIZES), "mean_tokens", lambda states: states.mean(0)),
    "qwen3_last": (
        Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
        "lasttoken",
        lambda states: states[-1],
    ),
    "qwen3_mean": (
        Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
        "mean_tokens",
        lambda states: states.mean(0),
    ),
}
MODELS["gemma_embedding_mean_ollama"] = MODELS["gemma_embedding_mean"]
CAUSAL = {"Gemma3TextModel": "Gemma3ForCausalLM", "Qwen3Model": "Qwen3ForCausalLM"}
SAVERS = {
    "bert_cls": save_word_pieces,
    "bert_mean": save_word_pieces,
    "jina_bert_v3_mean": save_unigram,
    "modern_bert_cls": save_framed_bytes,
    "nomic_bert_mean": save_word_pieces,
}


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module", params=MODELS)
def original(request, tmp_path_factory) -> Iterator[Original]:
    found = made(request.param, tmp_path_factory.mktemp("models"))
    replica = loaded(found.path)
    yield dataclasses.replace(found, replica=replica)
    replica.close()


def made(name: str, place: Path) -> Original:
    config, mode, pool = MODELS[name]
    folder = place / name
    model = write_tiny_folder(folder, config, maker=AutoModel)
    (folder / "chat_template.jinja").unlink()
    SAVERS.get(name, save_byte_pieces)(folder)
    (folder / "1_Pooling").mkdir()
    modes = {"cls_token": False, "mean_tokens": False, "lasttoken": False} | {mode: True}
    settings = {f"pooling_mode_{key}": value for key, value in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if "gemma_embedding" not in name:
        name_causal_model(folder / "config.json")
    for module, weight in DENSE.items() if "gemma_embedding" in name else ():
        write_dense(folder, module, weight)
    flavour = "ollama" if "ollama" in name else "llama.cpp"
    convert(folder, place / "model.gguf", type="f32", flavour=flavour)
    return Original(model, AutoTokenizer.from_pretrained(folder), pool, place / "model.gguf")


def name_causal_model(path: Path) -> None:
    """As the authors of decoders name them."""
    text = path.read_text()
    for name, whole in CAUSAL.items():
        text = text.replace(f'"{name}"', f'"{whole}"')
    path.write_text(text)


def ask(original: Original, path: str, **body: Any) -> httpx.Response:
    if original.replica is not None:
        return ask_replica(original.replica, path, **body)
    return ask_file(original.path, path, **body)


def ask_replica(replica: ModelReplica, path: str, **body: Any) -> httpx.Response:
    """One request through all layers from HTTP to the engine."""

    async def main() -> httpx.Response:
        async with http_client(replica) as client:
            return await client.post(path, json={"model": "demo", **body})

    return asyncio.run(main())


def ask_file(file: Path, path: str, **body: Any) -> httpx.Response:
    replica = loaded(file)
    try:
        return ask_replica(replica, path, **body)
    finally:
        replica.close()


def loaded(path: Path) -> ModelReplica:
    return load_replica(ModelSettings(name="demo", source=str(path), device="cpu", threads=1))


def test_vectors_of_texts_are_those_of_transformers(original) -> None:
    reply = ask(original, "/api/embed", input=list(TEXTS)).json()
    assert np.abs(np.array(reply["embeddings"]) - original.vectors(TEXTS)).max() <= TOLERANCE
    assert reply["prompt_eval_count"] == sum(len(original.tokens(text)) for text in TEXTS)


def test_openai_and_the_older_endpoint_give_the_same_vectors(original) -> None:
    body = {"input": list(TEXTS), "encoding_format": "base64"}
    data = ask(original, "/v1/embeddings", **body).json()["data"]
    found = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data]
    assert np.abs(np.stack(found) - original.vectors(TEXTS)).max() <= TOLERANCE
    older = ask(original, "/api/embeddings", prompt=TEXTS[1]).json()["embedding"]
    raw = original.raw(original.tokens(TEXTS[1]))
    assert np.abs(np.array(older) - raw).max() <= TOLERANCE * np.linalg.norm(raw)


@pytest.mark.parametrize("original", ["bert_mean"], indirect=True)
def test_fewer_dimensions_are_the_first_ones_normalised(original) -> None:
    reply = ask(original, "/v1/embeddings", input=TEXTS[0], dimensions=10).json()
    expected = unit(original.vectors(TEXTS[:1])[0, :10])
    assert np.abs(np.array(reply["data"][0]["embedding"]) - expected).max() <= TOLERANCE


def test_a_long_text_is_truncated_as_by_the_tokenizer(original) -> None:
    for most in (CONTEXT, 16):
        options = {} if most == CONTEXT else {"options": {"num_ctx": most}}
        reply = ask(original, "/api/embed", input=FAR_TOO_LONG, **options).json()
        expected = original.vectors([FAR_TOO_LONG], most)
        assert np.abs(np.array(reply["embeddings"]) - expected).max() <= TOLERANCE
        assert reply["prompt_eval_count"] == most


@pytest.mark.parametrize("original", ["bert_mean"], indirect=True)
def test_a_long_text_without_truncation_is_refused(original) -> None:
    response = ask(original, "/api/embed", input=FAR_TOO_LONG, truncate=False)
    assert response.status_code == 400
    assert "the input length exceeds the context length" in response.json()["error"]


@pytest.mark.parametrize("original", ["bert_mean"], indirect=True)
@pytest.mark.parametrize("truncate", [True, False])
def test_words_after_many_spaces_and_long_words_are_tokenised(original, truncate) -> None:
    reply = ask(original, "/api/embed", input=list(LONG_IN_CHARACTERS), truncate=truncate).json()
    expected = original.vectors(LONG_IN_CHARACTERS)
    assert np.abs(np.array(reply["embeddings"]) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("name", REFERENCES)
def test_vectors_of_encoders_that_transformers_lacks_are_those_of_references(
    name, tmp_path
) -> None:
    path, text = tmp_path / "tiny.gguf", TEXTS[0]
    reference = REFERENCES[name]
    tensors = reference.write(path)
    tokens = load_tokenizer(GGUFFile.open(path).metadata, architecture="bert").encode_document(text)
    expected = unit(reference.states(tensors, tokens).mean(0).numpy())
    for endpoint in ("/api/embed", "/v1/embeddings"):
        reply = ask_file(path, endpoint, input=text).json()
        found = reply["embeddings"][0] if "embeddings" in reply else reply["data"][0]["embedding"]
        assert np.abs(np.array(found) - expected).max() <= TOLERANCE
    assert capabilities(path) == {("embedding",)}


def test_embedding_models_are_listed_as_such(original) -> None:
    assert capabilities(original.path) == {("embedding",)}


def test_encoders_are_listed_as_such_if_files_do_not_state_it(original, tmp_path) -> None:
    check_listing_without_keys(original.path, tmp_path)


@pytest.mark.parametrize("name", REFERENCES)
def test_so_are_encoders_that_transformers_lacks(name, tmp_path) -> None:
    REFERENCES[name].write(tmp_path / "tiny.gguf")
    check_listing_without_keys(tmp_path / "tiny.gguf", tmp_path)


def check_listing_without_keys(path: Path, place: Path) -> None:
    """A file without the keys that tell embedding models is listed as what it is loaded as."""
    keys = dict.fromkeys(("attention.causal", "pooling_type"))
    tensors = dict.fromkeys(name for name in matrices(path) if name.startswith("dense"))
    silent = rewrite(path, place / "silent.gguf", own_keys=keys, tensors=tensors)
    listed = listed_file("demo", silent, has_projector=False, options=Options(), stored=None)
    generates = load(silent, device=META, dtype=torch.float32).decoder.generates
    assert listed.capabilities == (("completion",) if generates else ("embedding",))


def capabilities(path: Path) -> set[tuple[str, ...]]:
    """As the file, the loaded model and `caravan show` state them."""
    listed = listed_file("demo", path, has_projector=False, options=Options(), stored=None)
    shown = said("show", path)
    assert shown["supported"]
    replica = loaded(path)
    try:
        served = replica.describe().capabilities
    finally:
        replica.close()
    return {listed.capabilities, served, tuple(shown["capabilities"])}


@pytest.fixture(scope="module")
def of_ollama(tmp_path_factory) -> Original:
    return made("gemma_embedding_mean_ollama", tmp_path_factory.mktemp("models"))


def test_files_of_ollama_name_gemma_3_and_number_the_matrices_after_pooling(of_ollama) -> None:
    file = GGUFFile.open(of_ollama.path)
    assert file.metadata["general.architecture"] == "gemma3"
    assert file.metadata["gemma3.pooling_type"] == 1
    assert {"dense.0.weight", "dense.1.weight"} <= file.tensors.keys()
    assert not any("dense" in key for key in file.metadata)


def test_weights_include_the_matrices_after_pooling(of_ollama) -> None:
    file = GGUFFile.open(of_ollama.path)
    read: list[int] = []
    options = LoadOptions(progress=lambda done, _: read.append(done))
    cpu, after = torch.device("cpu"), [file.tensors[f"dense.{n}.weight"] for n in (0, 1)]
    model = load(of_ollama.path, device=cpu, dtype=torch.float32, options=options)
    assert model.decoder.weight_bytes == model.description.weight_bytes == read[-1]
    assert model.decoder.weight_bytes_on(cpu) == read[-1] > sum(info.nbytes for info in after)
    assert said("show", of_ollama.path)["memory"]["weight_bytes"] == read[-1]


def test_files_of_ollama_may_omit_keys_and_have_another_name_of_the_norm(
    of_ollama, tmp_path
) -> None:
    changed = rewrite(
        of_ollama.path,
        tmp_path / "changed.gguf",
        own_keys={"attention.causal": None, "rope.freq_base_swa": None},
        tensors={
            "output_norm.weight": None,
            "norm.weight": matrices(of_ollama.path)["output_norm.weight"],
        },
    )
    original = dataclasses.replace(of_ollama, path=changed)
    reply = ask(original, "/api/embed", input=list(TEXTS)).json()
    assert np.abs(np.array(reply["embeddings"]) - original.vectors(TEXTS)).max() <= TOLERANCE
    assert capabilities(changed) == {("embedding",)}


def test_files_of_ollama_without_pooling_state_the_direction(of_ollama, tmp_path) -> None:
    silent, alone = {"pooling_type": None}, {f"dense.{n}.weight": None for n in (0, 1)}
    path = rewrite(of_ollama.path, tmp_path / "mean.gguf", own_keys=silent, tensors=alone)
    assert capabilities(path) == {("embedding",)}
    path = rewrite(of_ollama.path, tmp_path / "tokens.gguf", own_keys=silent)
    with pytest.raises(UnsupportedModelError, match=r"`gemma3\.pooling_type`"):
        loaded(path)


def test_the_second_matrix_after_pooling_needs_the_first(of_ollama, tmp_path) -> None:
    tensors = {"dense.0.weight": None}
    path = rewrite(of_ollama.path, tmp_path / "second.gguf", tensors=tensors)
    with pytest.raises(ModelFileError, match=r"1 is not known.*\(dense\.1\.weight\)"):
        loaded(path)
