"""Defaults of tokenizers for missing keys are those of the family."""

from typing import Any

import pytest

from model_zoo.tokenizers.prefix_space import PrefixSpace, prefix_space
from model_zoo.tokenizers.pretokenizers import PRE_TOKENIZERS, choose_pre_tokenizer
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import (
    CONTROL,
    USER_DEFINED,
    byte_level_metadata,
    sentencepiece_metadata,
)


def test_an_html_tag_does_not_end_an_answer() -> None:
    """In Gemma's vocabulary it is user-defined, as llama.cpp's files state."""
    metadata = sentencepiece_metadata({"<end_of_turn>": CONTROL, "<eos>": CONTROL})
    for role in ("bos_token_id", "eos_token_id"):
        del metadata[f"tokenizer.ggml.{role}"]
    metadata["tokenizer.ggml.token_type"][2] = USER_DEFINED
    tokenizer = load_tokenizer(metadata, architecture="gemma3")
    ends = {tokenizer.token_text(token) for token in tokenizer.end_tokens}
    assert ends == {"<end_of_turn>", "<eos>"}
    assert tokenizer.token_bytes(tokenizer.encode("</s>")[0]) == b"</s>"


@pytest.mark.parametrize(
    ("architecture", "special", "roles"),
    [
        ("llama", (), ("<s>", "</s>")),
        ("gemma3", ("<bos>", "<eos>"), ("<bos>", "<eos>")),
    ],
)
def test_bos_and_eos_are_found_without_their_keys(
    architecture: str, special: tuple[str, ...], roles: tuple[str, str]
) -> None:
    metadata = sentencepiece_metadata(dict.fromkeys(special, CONTROL))
    for role in ("bos_token_id", "eos_token_id"):
        del metadata[f"tokenizer.ggml.{role}"]
    tokenizer = load_tokenizer(metadata, architecture=architecture)
    assert tokenizer.bos_id == tokenizer.id_of(roles[0]) and tokenizer.add_bos
    assert tokenizer.eos_id == tokenizer.id_of(roles[1]) and not tokenizer.add_eos


@pytest.mark.parametrize(
    ("architecture", "special", "row"),
    [
        ("llama", (), "llama-bpe"),
        ("mllama", (), "llama-bpe"),
        ("granitehybrid", (), "dbrx"),
        ("granite_swa", (), "dbrx"),
        ("exaone-moe", (), "exaone-moe"),
        ("falcon-h1", (), "falcon-h1"),
        ("nemotron_h", (), "pixtral"),
        ("nemotron_h_moe", (), "pixtral"),
        ("glm4", (), "glm4"),
        ("glm4moe", (), "glm4"),
        ("afmoe", (), "afmoe"),
        ("bailingmoe", (), "bailingmoe"),
        ("bailingmoe2", (), "bailingmoe2"),
        ("glm-dsa", (), "glm4"),
        ("glm4moelite", (), "glm4"),
        ("glmocr", (), "glm4"),
        ("cohere2moe", (), "cohere2moe"),
        ("hunyuan_vl", (), "hunyuan-dense"),
        ("hy_v3", (), "hunyuan-dense"),
        ("jais2", (), "jais-2"),
        ("laguna", (), "laguna"),
        ("lfm2", (), "llama-bpe"),
        ("kimi-linear", (), "kimi-k2"),
        ("llama4", (), "llama4"),
        ("chatglm", (), "glm4"),
        ("dbrx", (), "dbrx"),
        ("deepseek", (), "deepseek-llm"),
        ("deepseek32", (), "deepseek-v3"),
        ("exaone", (), "exaone"),
        ("falcon", (), "falcon"),
        ("olmo", (), "olmo"),
        ("phi2", (), "phi-2"),
        ("qwen2moe", (), "qwen2"),
        ("starcoder", (), "starcoder"),
        ("starcoder2", (), "starcoder"),
        ("mamba", (), "olmo"),
        ("mellum", (), "mellum2"),
        ("mimo2", (), "qwen2"),
        ("minimax-m3", (), "minimax-m2"),
        ("muse-glimmer", (), "llama4"),
        ("bloom", (), "bloom"),
        ("mpt", (), "mpt"),
        ("mistral3", (), "tekken"),
        ("mistral4", (), "tekken"),
        ("gptoss", (), "gpt-4o"),
        ("phi3", ("<|im_sep|>",), "dbrx"),
        ("phi3", ("<|assistant|>",), "gpt-4o"),
        ("grovemoe", (), "qwen2"),
        ("smallthinker", (), "qwen2"),
        ("qwen2", (), "qwen2"),
        ("qwen25vl", (), "qwen2"),
        ("qwen3moe", (), "qwen2"),
        ("qwen3next", (), "qwen2"),
        ("qwen3vlmoe", (), "qwen2"),
        ("qwen35", (), "qwen35"),
        ("qwen35moe", (), "qwen35"),
        ("gptneox", (), "olmo"),
        ("stablelm", (), "olmo"),
        ("step35", (), "deepseek-v3"),
    ],
)
def test_a_file_without_pre_tokenizer_uses_that_of_its_family(
    architecture: str, special: tuple[str, ...], row: str
) -> None:
    metadata = byte_level_metadata(dict.fromkeys(special, CONTROL))
    for pre in (None, "default"):
        metadata["tokenizer.ggml.pre"] = pre
        assert choose_pre_tokenizer(metadata, architecture) == PRE_TOKENIZERS[row]


@pytest.mark.parametrize(("length", "row"), [(50_304, "olmo"), (100_352, "stablelm2")])
def test_the_size_of_the_vocabulary_tells_stablelm_2_from_stablelm_3b(
    length: int, row: str
) -> None:
    """Fine-tunes of both have the tokens of ChatML."""
    special = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
    metadata = byte_level_metadata(special) | {"tokenizer.ggml.pre": None}
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens += [f"[{id}]" for id in range(len(tokens), length)]
    assert choose_pre_tokenizer(metadata, "stablelm") == PRE_TOKENIZERS[row]


def test_text_after_an_image_gets_a_prefix_space_as_after_a_token() -> None:
    tokenizer = load_tokenizer(sentencepiece_metadata({}), architecture="llama")
    assert tokenizer.encode_parts(["he", -1, "he", "", "he"]) == [
        *tokenizer.encode("he"),
        -1,
        *tokenizer.encode("he"),
        tokenizer.id_of("he"),
    ]


@pytest.mark.parametrize(
    ("architecture", "stated", "of_word", "of_space"),
    [
        ("llama", None, " he", " he"),
        ("phi3", None, " he", "  he"),
        ("phimoe", None, " he", "  he"),
        ("gemma3", None, "he", " he"),
        ("llama", False, "he", " he"),
        ("phi3", False, "he", " he"),
        ("gemma3", True, " he", " he"),
    ],
)
def test_the_file_states_whether_and_the_family_where_there_is_a_space_prefix(
    architecture: str, stated: bool | None, of_word: str, of_space: str
) -> None:
    keys = {} if stated is None else {"add_space_prefix": stated}
    tokenizer = load_tokenizer(sentencepiece_metadata({}, **keys), architecture=architecture)
    assert tokenizer.decode(tokenizer.encode_parts([2, "he"])) == of_word
    assert tokenizer.decode(tokenizer.encode_parts([2, " he"])) == of_space


@pytest.mark.parametrize(
    ("length", "rule"), [(64_000, PrefixSpace.WORDS), (125_696, PrefixSpace.NEVER)]
)
def test_the_size_of_the_vocabulary_tells_baichuan_2_from_baichuan_1(
    length: int, rule: PrefixSpace
) -> None:
    """Only the first has a space prefix."""
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": [""] * length}
    assert prefix_space(metadata, "baichuan") is rule
    metadata["tokenizer.ggml.add_space_prefix"] = True
    assert prefix_space(metadata, "baichuan") is PrefixSpace.WORDS
