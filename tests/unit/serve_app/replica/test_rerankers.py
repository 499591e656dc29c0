"""Rerankers from checkpoint to score, against the saved model and tokenizer for the same pairs."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    ModernBertConfig,
    Qwen3Config,
    XLMRobertaConfig,
)

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.tokenizers.pairs import pair_format
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import UnsupportedModelError
from serve_app.replica.replica import ModelReplica
from tests.families.encoder_references import REFERENCES
from tests.families.vision_configs import qwen3vl_config
from tests.gguf_files import rewrite
from tests.tiny_models import END, tiny_tokenizer, write_tiny_folder
from tests.tiny_vocabularies import (
    LONG,
    PLAIN_TEXTS,
    QUERY,
    save_answers,
    save_framed_bytes,
    save_unigram,
    save_word_pieces,
)
from tests.unit.serve_app.replica.test_embedding_models import (
    CONTEXT,
    SIZES,
    ask_file,
    ask_replica,
    capabilities,
    loaded,
)

TOLERANCE = 1e-5
# Texts of special tokens stay text here, as in llama.cpp.
TEXTS = PLAIN_TEXTS


def paired(tokenizer: Any, query: str, text: str, context: int) -> list[int]:
    return tokenizer(query, text, truncation="only_second", max_length=context).input_ids


# As Qwen's authors publish it, without the white space that `transformers` adds to nothing.
QWEN3_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_TASK = "Given a web search query, retrieve relevant passages that answer the query"
VL_END = "<|im_end|>\n<|im_start|>assistant\n"
VL_TASK = "Given a search query, retrieve relevant candidates that answer the query."


def in_prompt(tokenizer: Any, query: str, text: str, context: int) -> list[int]:
    body = f"<Instruct>: {QWEN3_TASK}\n<Query>: {query}\n<Document>: {text}"
    return enclosed(tokenizer, body, QWEN3_END, context)


def in_prompt_of_vl(tokenizer: Any, query: str, text: str, context: int) -> list[int]:
    body = f"<Instruct>: {VL_TASK}<Query>:{query}\n<Document>:{text}"
    return enclosed(tokenizer, body, VL_END, context)


def enclosed(tokenizer: Any, body: str, end: str, context: int) -> list[int]:
    begin, middle, last = (tokenizer(part).input_ids for part in (QWEN3_BEGIN, body, end))
    return [*begin, *middle[: context - len(begin) - len(last)], *last]


@dataclass(frozen=True)
class Kind:
    """A reranker as `transformers` makes it. prompt(tokenizer, query, text, context): its tokens.
    last: prefix of the weight of its last layer."""

    config: Any
    save: Callable[[Path], None]
    maker: Any = AutoModelForSequenceClassification
    prompt: Callable[[Any, str, str, int], list[int]] = paired
    context: int = CONTEXT
    last: str = "classifier."


QWEN3_CONTEXT = 512
QWEN3 = Qwen3Config(
    **SIZES | {"max_position_embeddings": QWEN3_CONTEXT},
    num_key_value_heads=2,
    head_dim=16,
    num_labels=1,
)
# XLM-RoBERTa counts positions from `pad_token_id` + 1.
MODELS: dict[str, Kind] = {
    "bert": Kind(BertConfig(**SIZES, num_labels=1), save_word_pieces),
    "xlm_roberta": Kind(
        XLMRobertaConfig(
            **SIZES | {"max_position_embeddings": CONTEXT + 2}, num_labels=1, type_vocab_size=1
        ),
        save_unigram,
        last="classifier.out_proj.",
    ),
    "modern_bert": Kind(
        ModernBertConfig(**SIZES, local_attention=16, num_labels=1, pad_token_id=0),
        save_framed_bytes,
    ),
    "qwen3": Kind(QWEN3, save_answers, prompt=in_prompt, context=QWEN3_CONTEXT, last="score."),
    "tiny-Qwen3-Reranker": Kind(
        QWEN3, save_answers, AutoModelForCausalLM, in_prompt, context=QWEN3_CONTEXT
    ),
    "tiny-Qwen3-VL-Reranker": Kind(
        qwen3vl_config(text={"max_position_embeddings": QWEN3_CONTEXT, "pad_token_id": None}),
        save_answers,
        AutoModelForImageTextToText,
        in_prompt_of_vl,
        context=QWEN3_CONTEXT,
    ),
}
ENCODERS = ("bert", "xlm_roberta")
WITH_ONE_ROW = (*ENCODERS, "modern_bert", "qwen3")


class Original:
    """A saved reranker as `transformers` runs it."""

    def __init__(self, name: str, place: Path) -> None:
        self.kind = kind = MODELS[name]
        self.name, self.folder, self.path = name, place / name, place / "model.gguf"
        pad = kind.config.get_text_config().pad_token_id
        write_tiny_folder(self.folder, kind.config, maker=kind.maker, pad_token_id=pad)
        (self.folder / "chat_template.jinja").unlink()
        (self.folder / "tokenizer.json").unlink()
        kind.save(self.folder)
        self.model = kind.maker.from_pretrained(self.folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        convert(self.folder, self.path, type="f32")

    @cached_property
    def replica(self) -> ModelReplica:
        return loaded(self.path)

    def tokens(self, query: str, text: str) -> list[int]:
        return self.kind.prompt(self.tokenizer, query, text, self.kind.context)

    def score(self, query: str, text: str) -> float:
        tokens = torch.tensor([self.tokens(query, text)])
        types = None
        if self.name == "bert":  # the text has the second type
            begin = self.tokens(query, text).index(self.tokenizer.sep_token_id) + 1
            types = {"token_type_ids": (torch.arange(tokens.shape[1]) >= begin).long()[None]}
        with torch.inference_mode():
            logits = self.model(tokens, **types or {}).logits
        return 1 / (1 + math.exp(-self.logit(logits)))

    def logit(self, logits: torch.Tensor) -> float:
        if logits.dim() == 2:
            return logits.item()
        yes, no = self.tokenizer.convert_tokens_to_ids(["yes", "no"])
        return (logits[0, -1, yes] - logits[0, -1, no]).item()


@pytest.fixture(scope="module", params=MODELS)
def original(request, tmp_path_factory) -> Iterator[Original]:
    made = Original(request.param, tmp_path_factory.mktemp("rerankers"))
    yield made
    made.replica.close()


def test_scores_are_those_of_transformers(original) -> None:
    texts = [*TEXTS, LONG]
    reply = ask_replica(original.replica, "/v1/score", text_1=QUERY, text_2=texts).json()
    scores = [entry["score"] for entry in reply["data"]]
    expected = [original.score(QUERY, text) for text in texts]
    assert max(abs(a - b) for a, b in zip(scores, expected, strict=True)) <= TOLERANCE
    assert max(expected) - min(expected) > 100 * TOLERANCE, "the texts can be told apart"
    assert reply["usage"]["prompt_tokens"] == sum(len(original.tokens(QUERY, t)) for t in texts)


@pytest.mark.parametrize("original", WITH_ONE_ROW, indirect=True)
def test_a_file_may_have_the_last_layer_as_a_vector(original, tmp_path) -> None:
    """And may lack the keys that later converters write."""
    weight = original.model.state_dict()[f"{original.kind.last}weight"].numpy()
    path = rewrite(
        original.path,
        tmp_path / "older.gguf",
        keys={} if original.name == "modern_bert" else {"tokenizer.ggml.add_sep_token": None},
        tensors={"cls.output.weight": weight[0]},
    )
    reply = ask_file(path, "/v1/score", text_1=QUERY, text_2=TEXTS[0]).json()
    expected = original.score(QUERY, TEXTS[0])
    assert abs(reply["data"][0]["score"] - expected) <= TOLERANCE


@pytest.fixture
def of_llama_cpp(original, tmp_path) -> Path:
    """The file as llama.cpp's converter writes it: it states no pooling of rerankers."""
    keys: dict[str, Any] = {"bert.pooling_type": None}
    if original.name == "bert":  # as the `gguf` package writes for WordPiece
        flags = {"bos": True, "eos": True, "sep": False}
        keys |= {f"tokenizer.ggml.add_{name}_token": value for name, value in flags.items()}
    return rewrite(original.path, tmp_path / "llama.cpp.gguf", keys=keys)


@pytest.mark.parametrize("original", ENCODERS, indirect=True)
def test_files_of_llama_cpp_have_the_same_scores(original, of_llama_cpp) -> None:
    body = {"text_1": QUERY, "text_2": list(TEXTS)}
    replies = [ask_file(path, "/v1/score", **body).json() for path in (original.path, of_llama_cpp)]
    assert replies[0]["data"] == replies[1]["data"]
    assert replies[0]["usage"] == replies[1]["usage"]


@pytest.mark.parametrize("original", ENCODERS, indirect=True)
def test_files_of_llama_cpp_are_listed_as_rerankers(of_llama_cpp) -> None:
    assert capabilities(of_llama_cpp) == {("rerank",)}


def write_single_matrix(folder: Path) -> tuple[Path, Callable[[list[int]], float]]:
    """The file of a reranker whose head is one matrix, as of Jina's first rerankers, and its
    logits. RoBERTa's tokenizer gives all tokens the first of the two types."""
    reference, path = REFERENCES["jina-bert-v2"], folder / "ranks.gguf"
    tensors = reference.write(folder / "embeds.gguf")
    weight, second = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(1))
    bias, end = torch.ones(1) / 3, tiny_tokenizer().token_to_id(END)
    ends = {f"{role}_token_id": end for role in ("bos", "eos", "seperator")}
    flags = {f"add_{role}_token": True for role in ("bos", "eos", "sep")}
    keys = ends | flags | {"token_type_count": 2}
    rewrite(
        folder / "embeds.gguf",
        path,
        keys={f"tokenizer.ggml.{key}": value for key, value in keys.items()},
        own_keys={"pooling_type": None},
        tensors={
            "cls.weight": weight.numpy() / 8,
            "cls.bias": bias.numpy(),
            "token_types.weight": torch.cat([tensors["token_types.weight"], second]).numpy(),
        },
    )
    return path, lambda tokens: (reference.states(tensors, tokens)[0] @ weight[0] / 8 + bias).item()


def encoded_pairs(path: Path) -> list[list[int]]:
    metadata = GGUFFile.open(path).metadata
    tokenizer = load_tokenizer(metadata, architecture=str(metadata["general.architecture"]))
    encode = pair_format(tokenizer, metadata).encoder(QUERY)
    length = Metadata(metadata, path=path).require_size("context_length")
    return [encode(text, at_most=length) for text in TEXTS]


def test_a_single_matrix_is_the_last_layer(tmp_path) -> None:
    path, logit = write_single_matrix(tmp_path)
    reply = ask_file(path, "/v1/score", text_1=QUERY, text_2=list(TEXTS)).json()
    for entry, tokens in zip(reply["data"], encoded_pairs(path), strict=True):
        assert abs(entry["score"] - 1 / (1 + math.exp(-logit(tokens)))) <= TOLERANCE
    assert capabilities(path) == {("rerank",)}


@pytest.mark.parametrize("original", ["modern_bert"], indirect=True)
def test_a_modern_bert_that_does_not_state_it_pools_the_mean(original, tmp_path) -> None:
    """As files of llama.cpp's converter."""
    keys = {"classifier.pooling_type": None, "pooling_type": None}
    path = rewrite(original.path, tmp_path / "mean.gguf", own_keys=keys)
    original.model.config.classifier_pooling = "mean"
    try:
        expected = original.score(QUERY, TEXTS[0])
    finally:
        original.model.config.classifier_pooling = "cls"
    reply = ask_file(path, "/v1/score", text_1=QUERY, text_2=TEXTS[0]).json()
    assert abs(reply["data"][0]["score"] - expected) <= TOLERANCE
    assert abs(original.score(QUERY, TEXTS[0]) - expected) > 100 * TOLERANCE


def test_pairs_have_queries_of_their_own(original) -> None:
    queries = list(reversed(TEXTS))
    reply = ask_replica(original.replica, "/v1/score", text_1=queries, text_2=list(TEXTS)).json()
    for entry, query, text in zip(reply["data"], queries, TEXTS, strict=True):
        assert abs(entry["score"] - original.score(query, text)) <= TOLERANCE


@pytest.mark.parametrize("original", ["bert"], indirect=True)
def test_documents_are_ranked_by_relevance(original) -> None:
    body = {"query": QUERY, "documents": list(TEXTS), "top_n": 3, "return_documents": True}
    results = ask_replica(original.replica, "/v1/rerank", **body).json()["results"]
    expected = sorted(TEXTS, key=lambda text: -original.score(QUERY, text))[:3]
    assert [result["document"]["text"] for result in results] == expected
    assert [TEXTS[result["index"]] for result in results] == expected


def test_a_reranker_embeds_nothing_and_says_so(original) -> None:
    response = ask_replica(original.replica, "/api/embed", input="hello")
    assert response.status_code == 400
    assert "does not support embedding" in response.json()["error"]
    assert capabilities(original.path) == {("rerank",)}


@pytest.mark.parametrize("original", ["qwen3"], indirect=True)
def test_a_decoder_that_ranks_completes_nothing(original) -> None:
    response = ask_replica(original.replica, "/v1/completions", prompt="hello")
    assert response.status_code == 400
    assert "does not support completion" in response.json()["error"]["message"]


@pytest.mark.parametrize("original", ["bert", "qwen3"], indirect=True)
def test_a_query_that_fills_the_context_is_refused(original) -> None:
    response = ask_replica(original.replica, "/v1/rerank", query=LONG, documents=["a"])
    assert response.status_code == 400
    assert "the input length exceeds the context length" in response.json()["error"]["message"]


@pytest.mark.parametrize("original", ["bert"], indirect=True)
def test_a_file_that_classifies_by_several_labels_is_refused(original, tmp_path) -> None:
    labels = {"classifier.output_labels": ["good", "bad"]}
    path = rewrite(original.path, tmp_path / "two.gguf", own_keys=labels)
    with pytest.raises(UnsupportedModelError, match=r"2 labels \(`bert\.classifier"):
        ask_file(path, "/v1/score", text_1=QUERY, text_2=TEXTS[0])


def test_a_classifier_of_several_labels_is_not_converted(tmp_path) -> None:
    folder = tmp_path / "many"
    config = BertConfig(**SIZES, num_labels=3)
    write_tiny_folder(folder, config, maker=AutoModelForSequenceClassification)
    save_word_pieces(folder)
    with pytest.raises(UnsupportedModelError, match="3 labels; rerankers have one"):
        convert(folder, tmp_path / "model.gguf", type="f32")
